"""prepare_dataset_shard: datasets of which each worker reads its own part already."""

from __future__ import annotations

from typing import Any


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Return the `tf.data.Dataset` without automatic sharding, and with prefetching.

    For a dataset that has only the rows of this worker: TensorFlow would shard it a second time.
    Raises ImportError without tensorflow.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)
