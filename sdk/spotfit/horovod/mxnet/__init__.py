"""Raises UnsupportedNameError when it is imported: Horovod's interface exists for PyTorch only."""

from spotfit.core.errors import UnsupportedNameError

raise UnsupportedNameError(
    "spotfit.horovod.mxnet does not exist: Horovod's collectives for MXNet are part of its own "
    "library.",
    do="Use spotfit.horovod.torch after porting the model to PyTorch.",
)
