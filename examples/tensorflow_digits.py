"""Four workers on two nodes train one Keras model, which resumes exactly after an interruption.

Each worker reads its own rows. For a cloud, name its provisioner and set `storage_path` to a
bucket.
"""

import tempfile
from typing import Any

import spotfit
from spotfit.tensorflow import TensorflowTrainer, prepare_dataset_shard

EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 12, 14, 128


def train() -> None:
    """Run on every worker; `tf.keras` is the legacy Keras of the package tf-keras."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    from spotfit.tensorflow.keras import ReportCheckpointCallback, restore_model

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        tf.keras.utils.set_random_seed(7)
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [layers.Input((64,)), layers.Dense(32, "relu"), layers.Dense(10)]
        )
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.01),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    features, labels = load_digits(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), None, context.get_world_size())

    def rows_of_epoch(epoch: int) -> Any:
        # The order depends on the epoch only: a restarted worker continues with the same rows.
        rows = tf.data.Dataset.from_tensor_slices((features[part] / 16.0, labels[part]))
        return prepare_dataset_shard(rows.shuffle(500, seed=epoch).repeat().batch(BATCH_SIZE))

    for epoch in range(restore_model(model), EPOCHS):
        model.fit(
            rows_of_epoch(epoch),
            initial_epoch=epoch,
            epochs=epoch + 1,
            steps_per_epoch=STEPS_PER_EPOCH,
            callbacks=[ReportCheckpointCallback()],
            verbose=0,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = TensorflowTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="tensorflow", storage_path=storage),
            provisioner="local?nodes=2",
        )
        result = trainer.fit()
        assert result.metrics is not None
        print(f"{EPOCHS} epochs, accuracy above 90 %: {result.metrics['accuracy'] > 0.9}")
