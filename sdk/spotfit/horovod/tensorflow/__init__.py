"""Raises MissingExtraError when it is imported: Horovod's interface exists for PyTorch only."""

from spotfit.core.errors import MissingExtraError

raise MissingExtraError(
    "spotfit.horovod.tensorflow does not exist: Horovod's collectives for TensorFlow are part of "
    "its own library.",
    do="Use spotfit.tensorflow.TensorflowTrainer with tf.distribute.MultiWorkerMirroredStrategy.",
)
