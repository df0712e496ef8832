"""JAX in four real workers: runs with kills give the weights of an undisturbed run."""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import numpy  # noqa: E402

import spotfit  # noqa: E402
from spotfit.jax import JaxTrainer  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    kill_machine_of_rank,
    machine_kill,
    no_disturbance,
    read_file,
    worker_kills,
)
from tests.live.cloud import LiveTestCloud  # noqa: E402

STEPS = 40
STEPS_PER_CHECKPOINT = 5
BATCH_SIZE = 64
DROPOUT = 0.25
TREES = ("weights", "momentum")


def training_function(disturbance: Disturbance) -> Any:
    def train(config: dict[str, Any]) -> int:
        step_of_weights, update, load_batch = make_training()
        first_step, weights = load_checkpoint()
        state = step_of_weights(weights)
        for step in range(first_step, STEPS):
            disturbance(config, step)
            state, loss = update(state, load_batch(step), step)
            save_due = (step + 1) % STEPS_PER_CHECKPOINT == 0
            report({"step": step, "loss": float(loss)}, state if save_due else None, step + 1)
        return int(jax.device_count())

    return train


def make_training() -> Any:
    """Return functions that place weights, train one step and load a batch on all devices."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    features, labels = (features / 16.0).astype("float32"), labels.astype("int32")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def loss_of(weights: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        x = x * jax.random.bernoulli(key, 1 - DROPOUT, x.shape) / (1 - DROPOUT)
        scores = jax.nn.log_softmax(x @ weights["w"] + weights["b"])
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    def sgd(state: Any, batch: Any, step: Any) -> Any:
        weights, momentum = state
        key = jax.random.fold_in(jax.random.key(11), step)
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch, key)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum), loss

    def load_batch(step: int) -> Any:
        first = step * BATCH_SIZE % (len(features) - BATCH_SIZE)
        rows = slice(first, first + BATCH_SIZE)
        own = jax.process_index() * BATCH_SIZE // jax.process_count()
        part = slice(own, own + BATCH_SIZE // jax.process_count())
        batch = (features[rows][part], labels[rows][part])
        return tuple(jax.make_array_from_process_local_data(split, one) for one in batch)

    def place(state: Any) -> Any:
        return jax.tree.map(lambda one: jax.device_put(one, whole), state)

    return place, jax.jit(sgd, out_shardings=(whole, whole)), load_batch


def load_checkpoint() -> tuple[int, Any]:
    """Return the number of steps done, and weights and momentum."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        zeros = {"w": numpy.zeros((64, 10), "float32"), "b": numpy.zeros(10, "float32")}
        return 0, (zeros, {name: one.copy() for name, one in zeros.items()})
    with checkpoint.as_directory() as directory, numpy.load(Path(directory, "state.npz")) as file:
        trees = [{name: file[f"{tree}/{name}"] for name in "wb"} for tree in TREES]
        return int(file["steps"]), tuple(trees)


def report(metrics: dict[str, Any], state: Any, steps: int) -> None:
    """Report on all ranks; on rank 0 with weights and momentum, if there is a state."""
    if state is None or spotfit.get_context().get_world_rank() != 0:
        spotfit.report(metrics)
        return
    arrays = {f"{n}/{k}": v for n, tree in zip(TREES, state, strict=True) for k, v in tree.items()}
    with tempfile.TemporaryDirectory() as directory:
        numpy.savez(Path(directory, "state.npz"), steps=steps, **arrays)
        spotfit.report(metrics, checkpoint=spotfit.Checkpoint.from_directory(directory))


def trainer(cloud: LiveTestCloud, fn: Any, name: str) -> spotfit.DataParallelTrainer:
    return cloud.trainer(fn, workers=4, nodes=2, max_failures=2, name=name, trainer_type=JaxTrainer)


def weights_of(result: spotfit.Result) -> dict[str, Any]:
    with numpy.load(io.BytesIO(read_file(result, "state.npz"))) as file:
        return {name: file[name].tobytes() for name in file.files}


def test_killed_workers_do_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    assert calm.return_value == 4, "one runtime of all workers"
    stormy = trainer(cloud, training_function(worker_kills), "stormy").fit()
    assert weights_of(stormy) == weights_of(calm)
    assert stormy.metrics == calm.metrics
    assert calm.metrics is not None
    assert calm.metrics["loss"] < 1.0
    closed = cloud.rounds_closed("stormy")
    assert [one.cause for one in closed] == [FailureCause.WORKER] * 2
    assert [one.reason.partition(":")[0] for one in closed] == ["rank 1 died", "rank 0 died"]


def test_a_killed_machine_does_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(machine_kill), "run").submit()
    result = kill_machine_of_rank(cloud, 3, run)
    assert weights_of(result) == weights_of(calm)
    assert cloud.view("run").failure_counts == {FailureCause.PREEMPTION: 1}


def test_ranks_that_return_at_different_times_end_the_run(cloud: LiveTestCloud) -> None:
    def return_late() -> int:
        from jax.experimental import multihost_utils

        rank = spotfit.get_context().get_world_rank()
        multihost_utils.sync_global_devices("start")
        # Longer than the shutdown of JAX may take.
        time.sleep(6.0 if rank == 1 else 0.0)
        return rank

    environment = {"env_vars": {"JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S": "3"}}
    result = cloud.trainer(
        return_late, workers=2, trainer_type=JaxTrainer, worker_runtime_env=environment
    ).fit()
    assert result.return_value == 0
    assert len(cloud.rounds_opened()) == 1
