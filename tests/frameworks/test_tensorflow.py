"""TensorFlow in four real workers: runs with kills give the weights of an undisturbed run."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import spotfit
from spotfit.model.events import FailureCause
from spotfit.tensorflow import TensorflowTrainer, prepare_dataset_shard
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session
from tests.frameworks.machine_kills import (
    Disturbance,
    kill_machine_of_rank,
    machine_kill,
    no_disturbance,
    read_file,
    worker_kills,
)
from tests.live.cloud import LiveTestCloud

EPOCHS = 6
STEPS_PER_EPOCH = 6
BATCH_SIZE = 64


def training_function(disturbance: Disturbance) -> Any:
    def train(config: dict[str, Any]) -> str:
        import tensorflow as tf

        from spotfit.tensorflow.keras import ReportCheckpointCallback, restore_model

        class Disturb(tf.keras.callbacks.Callback):
            """Calls a disturbance before each step."""

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                disturbance(config, self.epoch * STEPS_PER_EPOCH + batch)

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = compile_model(tf)
        first_epoch = restore_model(model)
        report = ReportCheckpointCallback(metrics={"loss": "loss", "acc": "accuracy"})
        for epoch in range(first_epoch, EPOCHS):
            model.fit(
                rows_of_rank(tf, seed=epoch),
                initial_epoch=epoch,
                epochs=epoch + 1,
                steps_per_epoch=STEPS_PER_EPOCH,
                callbacks=[Disturb(), report],
                verbose=0,
            )
        return f"{tf.keras.Model.__module__.partition('.')[0]} {strategy.num_replicas_in_sync}"

    return train


def compile_model(tf: Any) -> Any:
    tf.keras.utils.set_random_seed(7)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((64,)), layers.Dense(16, activation="relu"), layers.Dense(10)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def rows_of_rank(tf: Any, *, seed: int) -> Any:
    """Return the rows of this rank in the order of that epoch, in global batches."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), None, context.get_world_size())
    rows = tf.data.Dataset.from_tensor_slices(((features / 16.0)[part], labels[part]))
    return prepare_dataset_shard(rows.shuffle(500, seed=seed).batch(BATCH_SIZE).repeat())


def trainer(cloud: LiveTestCloud, fn: Any, name: str) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn, workers=4, nodes=2, max_failures=2, name=name, trainer_type=TensorflowTrainer
    )


def test_the_state_of_a_legacy_optimizer_is_restored() -> None:
    import numpy as np
    import tensorflow as tf

    from spotfit.tensorflow.keras_callback import report_model, restore_model

    keras = pytest.importorskip("tf_keras")
    rows = np.arange(12.0).reshape(4, 3) / 12

    def compiled() -> Any:
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
            model.compile(optimizer=keras.optimizers.legacy.Adam(0.1), loss="mse")
        return model

    with use_session(LocalSession("run")):
        model = compiled()
        assert restore_model(model) == 0
        model.fit(rows, rows[:, :2], epochs=2, verbose=0)
        report_model(model, {}, epochs_done=2)
        restored = compiled()
        assert restore_model(restored) == 2
    state = [one.tolist() for one in model.optimizer.get_weights()]
    assert len(state) == 5
    assert [one.tolist() for one in restored.optimizer.get_weights()] == state
    for one in (model, restored):
        one.fit(rows, rows[:, :2], initial_epoch=2, epochs=3, shuffle=False, verbose=0)
    assert np.array_equal(restored.get_weights()[0], model.get_weights()[0])


def weights_of(result: spotfit.Result) -> list[list[Any]]:
    """Return names and bytes of weights and optimizer state; the archive itself has times."""
    import h5py

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.keras").write_bytes(read_file(result, "model.keras"))
        with zipfile.ZipFile(Path(directory, "model.keras")) as archive:
            archive.extract("model.weights.h5", directory)
        arrays: list[list[Any]] = []
        with h5py.File(Path(directory, "model.weights.h5")) as file:
            file.visititems(
                lambda name, item: (
                    arrays.append([name, item[()].tobytes()])
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
    assert len(arrays) > 8, "weights and the moments of Adam"
    return sorted(arrays)


def test_killed_workers_do_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    assert calm.return_value == "tf_keras 4", "the legacy Keras with one replica for each worker"
    stormy = trainer(cloud, training_function(worker_kills), "stormy").fit()
    assert weights_of(stormy) == weights_of(calm)
    assert stormy.metrics == calm.metrics
    assert calm.metrics is not None
    assert calm.metrics["acc"] > 0.4
    closed = cloud.rounds_closed("stormy")
    assert [one.cause for one in closed] == [FailureCause.WORKER] * 2
    assert [one.reason.partition(":")[0] for one in closed] == ["rank 1 died", "rank 0 died"]


def test_a_killed_machine_does_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(machine_kill), "run").submit()
    result = kill_machine_of_rank(cloud, 3, run)
    assert weights_of(result) == weights_of(calm)
    assert cloud.view("run").failure_counts == {FailureCause.PREEMPTION: 1}
