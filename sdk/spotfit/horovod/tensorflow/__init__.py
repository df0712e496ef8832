"""Raises UnsupportedNameError when it is imported: Horovod's interface exists for PyTorch only."""

from spotfit.core.errors import UnsupportedNameError

raise UnsupportedNameError(
    "spotfit.horovod.tensorflow does not exist: Horovod's collectives for TensorFlow are part of "
    "its own library.",
    do="Use spotfit.tensorflow.TensorflowTrainer with tf.distribute.MultiWorkerMirroredStrategy.",
)
