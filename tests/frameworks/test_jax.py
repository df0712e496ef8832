"""JAX in four real workers: runs with kills give the state of an undisturbed run."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy  # noqa: E402

import spotfit  # noqa: E402
import spotfit.data  # noqa: E402
from spotfit.jax import Checkpointer, JaxTrainer, export_checkpoint  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    await_machine_kill,
    kill_machine_of_rank,
    kill_own_worker,
    machine_kill,
    no_disturbance,
    worker_kills,
)
from tests.live.cloud import LiveTestCloud, eventually  # noqa: E402

STEPS = 40
STEPS_PER_SAVE = 5
BATCH_SIZE = 64
DROPOUT = 0.25


def training_function(disturbance: Disturbance) -> Any:
    def train(config: dict[str, Any]) -> str:
        """Return the digest of the last state; record those of the restored and saved states."""
        state, update, load_batch = make_training()
        checkpointer = Checkpointer(state, every=STEPS_PER_SAVE)
        restored = checkpointer.restore()
        state = checkpointer.state
        if restored is not None:
            record(config, f"restored {restored.step} {restored.source} {digest_of(state)}")
        metrics = {"loss": 9.0}
        for step in range(checkpointer.steps, STEPS):
            disturbance(config, step)
            state, loss = update(state, load_batch(step), step)
            metrics = {"loss": float(loss)}
            checkpointer.step(state, metrics)
            if checkpointer.steps % STEPS_PER_SAVE == 0:
                record(config, f"saved {checkpointer.steps} {digest_of(state)}")
        assert metrics["loss"] < 1.0
        assert jax.device_count() == spotfit.get_context().get_world_size(), "one runtime"
        return digest_of(state)

    return train


def make_training() -> Any:
    """Return the initial state, and functions that train one step and load a batch.

    Weights are replicated, and the momentum of the matrix is sharded over the processes.
    """
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    features, labels = (features / 16.0).astype("float32"), labels.astype("int32")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    shardings = {
        "weights": {"w": whole, "b": whole},
        "momentum": {"w": split, "b": whole},
        "key": whole,
    }

    def loss_of(weights: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        x = x * jax.random.bernoulli(key, 1 - DROPOUT, x.shape) / (1 - DROPOUT)
        scores = jax.nn.log_softmax(x @ weights["w"] + weights["b"])
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    def sgd(state: Any, batch: Any, step: Any) -> Any:
        weights = state["weights"]
        key = jax.random.fold_in(state["key"], step)
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch, key)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
        return {"weights": weights, "momentum": momentum, "key": state["key"]}, loss

    def load_batch(step: int) -> Any:
        first = step * BATCH_SIZE % (len(features) - BATCH_SIZE)
        rows = slice(first, first + BATCH_SIZE)
        own = jax.process_index() * BATCH_SIZE // jax.process_count()
        part = slice(own, own + BATCH_SIZE // jax.process_count())
        batch = (features[rows][part], labels[rows][part])
        return tuple(jax.make_array_from_process_local_data(split, one) for one in batch)

    zeros = {"w": numpy.zeros((64, 10), "float32"), "b": numpy.zeros(10, "float32")}
    initial = {"weights": zeros, "momentum": zeros, "key": None}
    update = jax.jit(
        sgd,
        in_shardings=(shardings, split, None),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    # A key is an array of this process already, which device_put cannot move to all of them.
    key = jax.jit(lambda: jax.random.key(11), out_shardings=whole)()
    state = jax.device_put(initial, shardings | {"key": None}) | {"key": key}
    return state, update, load_batch


def digest_of(state: Any) -> str:
    """Return a digest of the complete state. A collective."""
    from jax.experimental import multihost_utils

    plain = state | {"key": jax.random.key_data(state["key"])}
    arrays = jax.tree.leaves(multihost_utils.process_allgather(plain, tiled=True))
    return hashlib.sha256(b"".join(numpy.asarray(one).tobytes() for one in arrays)).hexdigest()


def record(config: dict[str, Any], line: str) -> None:
    """Append a line to the records of the run, on rank 0."""
    context = spotfit.get_context()
    if context.get_world_rank() == 0:
        name = f"records-{context.get_experiment_name()}-{context.get_world_size()}"
        with Path(config["marks"], name).open("a") as file:
            file.write(f"{line}\n")


def records(cloud: LiveTestCloud, name: str, kind: str, *, workers: int = 4) -> list[list[str]]:
    """Return the recorded words after `kind`, "restored" or "saved"."""
    path = cloud.marks / f"records-{name}-{workers}"
    lines = [line.split() for line in path.read_text().splitlines()]
    return [words for first, *words in lines if first == kind]


def trainer(
    cloud: LiveTestCloud, fn: Any, name: str, *, workers: int = 4, max_failures: int = 2
) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn, workers=workers, nodes=2, max_failures=max_failures, name=name, trainer_type=JaxTrainer
    )


def stop(config: dict[str, Any], step: int) -> None:
    if step == 18:
        raise RuntimeError("stopped")


def loss_of_all_machines(config: dict[str, Any], step: int) -> None:
    """All ranks wait in step 17, after the snapshot of step 15."""
    await_machine_kill(config["marks"], step, at_step=17)


@pytest.mark.timeout(300)
def test_killed_workers_resume_from_memory_with_the_same_result(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    stormy = trainer(cloud, training_function(worker_kills), "stormy").fit()
    assert stormy.return_value == calm.return_value
    saved = dict(records(cloud, "calm", "saved"))
    assert records(cloud, "stormy", "restored") == [
        ["10", "memory", saved["10"]],
        ["25", "memory", saved["25"]],
    ]
    closed = cloud.rounds_closed("stormy")
    assert [one.cause for one in closed] == [FailureCause.WORKER] * 2
    assert [one.reason.partition(":")[0] for one in closed] == ["rank 1 died", "rank 0 died"]
    assert stormy.checkpoint is not None
    export_checkpoint(stormy.checkpoint, cloud.folder / "state.safetensors")
    assert (cloud.folder / "state.safetensors").stat().st_size > 2 * 64 * 10 * 4


@pytest.mark.timeout(300)
def test_a_killed_machine_does_not_change_the_result(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(machine_kill), "run").submit()
    result = kill_machine_of_rank(cloud, 3, run)
    assert result.return_value == calm.return_value
    assert cloud.view("run").failure_counts == {FailureCause.PREEMPTION: 1}
    assert [words[0] for words in records(cloud, "run", "restored")] == ["15"]


@pytest.mark.timeout(300)
def test_after_the_loss_of_all_machines_the_bucket_is_restored(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm").fit()
    run = trainer(cloud, training_function(loss_of_all_machines), "run").submit()
    for rank in (0, 3):
        cloud.wait_for_mark(f"waiting-{rank}")
    eventually(lambda: len(cloud.view("run").checkpoints) == 3)
    for node in [cloud.node_of_rank(rank, "run") for rank in (0, 3)]:
        cloud.reclaimer.kill(node)
    cloud.write_mark("machine-killed")
    assert run.result().return_value == calm.return_value
    assert [words[:2] for words in records(cloud, "run", "restored")] == [["15", "bucket"]]


def test_another_number_of_processes_restores_the_same_values(cloud: LiveTestCloud) -> None:
    with pytest.raises(spotfit.WorkerGroupError, match="stopped"):
        trainer(cloud, training_function(stop), "run", max_failures=0).fit()
    trainer(cloud, training_function(no_disturbance), "run", workers=2).fit()
    saved = dict(records(cloud, "run", "saved"))
    assert records(cloud, "run", "restored", workers=2) == [["15", "bucket", saved["15"]]]


def train_on_dataset(config: dict[str, Any]) -> tuple[float, int]:
    """Train a line on noisy rows; return the slope and the number of rows of this process."""
    import jax.numpy as jnp

    def sgd(weights: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            return jnp.square(weights[0] * batch["x"] + weights[1] - batch["y"]).mean()

        return weights - 0.1 * jax.grad(loss_of)(weights)

    update = jax.jit(sgd)
    shard = spotfit.get_dataset_shard("train")
    # Leaves that every process has for itself, and that are equal on all of them.
    state = {"weights": jnp.zeros(2), "rows": numpy.zeros(1, int), "passes": 0}
    checkpointer = Checkpointer(state, loader=shard, every=[2, "epoch"])
    restored = checkpointer.restore()
    state = checkpointer.state
    for _ in range(restored.epoch if restored else 0, 3):
        for batch in shard.iter_jax_batches(batch_size=16):
            state = {
                "weights": update(state["weights"], batch),
                "rows": state["rows"] + 16,
                "passes": state["passes"],
            }
            checkpointer.step(state)
            kill_own_worker(config["marks"], checkpointer.steps, at_step=config["kill_at"], rank=1)
    return float(state["weights"][0]), int(state["rows"][0])


def train_flax(config: dict[str, Any]) -> tuple[str, int]:
    """Train flax's state, whose step is a number until the first update; return its digest."""
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    def predict(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    def adamw(state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.square(predict(params, x) - 1.0).mean())
        return state.apply_gradients(grads=gradients(state.params))

    update = jax.jit(adamw)
    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    schedule = optax.linear_schedule(0.1, 0.0, STEPS)
    state = TrainState.create(apply_fn=predict, params=params, tx=optax.adamw(schedule))
    checkpointer = Checkpointer(state, every=STEPS_PER_SAVE)
    checkpointer.restore()
    state = checkpointer.state
    assert (int(state.step), type(state.step)) == (checkpointer.steps, int)
    for step in range(checkpointer.steps, STEPS):
        state = update(state, jax.random.normal(jax.random.key(step), (8, 4)))
        checkpointer.step(state)
        kill_own_worker(config["marks"], checkpointer.steps, at_step=config["kill_at"], rank=1)
    arrays = [numpy.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(arrays)).hexdigest(), int(state.step)


def test_a_state_of_flax_continues_with_the_same_result(cloud: LiveTestCloud) -> None:
    results = [
        cloud.fit(
            train_flax,
            workers=2,
            nodes=2,
            max_failures=1,
            name=name,
            trainer_type=JaxTrainer,
            config={"kill_at": kill_at},
        )
        for name, kill_at in (("calm", 0), ("killed", 18))
    ]
    assert len(cloud.rounds_closed("killed")) == 1
    assert results[1].return_value == results[0].return_value
    assert results[0].return_value[1] == STEPS


def add_noise(batch: dict[str, Any]) -> dict[str, Any]:
    noise = numpy.random.standard_normal(len(batch["x"]))
    return batch | {"x": batch["x"] + 0.1 * noise.astype("float32")}


def test_a_dataset_continues_where_it_was_saved(cloud: LiveTestCloud) -> None:
    rows = [{"x": numpy.float32(n / 256), "y": numpy.float32(n / 128)} for n in range(256)]
    data = spotfit.data.from_items(rows).random_shuffle(seed=1).map_batches(add_noise)
    results = [
        cloud.fit(
            train_on_dataset,
            workers=2,
            nodes=2,
            max_failures=1,
            name=name,
            trainer_type=JaxTrainer,
            datasets={"train": data},
            config={"kill_at": kill_at},
        )
        for name, kill_at in (("calm", 0), ("killed", 11))
    ]
    assert len(cloud.rounds_closed("killed")) == 1
    assert results[1].return_value == results[0].return_value
    assert results[0].return_value[1] == 3 * 128, "half of the rows in each of three epochs"


def train_apart(config: dict[str, Any]) -> list[float]:
    """Train an array that differs between the processes; return its restored values."""
    rank = spotfit.get_context().get_world_rank()
    large = jax.numpy.zeros((2000, 1000))
    checkpointer = Checkpointer({"own": large, "number": 0}, every=10**6)
    restored = checkpointer.restore()
    if restored is None:
        checkpointer.step({"own": large + rank + 1, "number": 3})
        checkpointer.save(checkpointer.state)
        kill_own_worker(config["marks"], 1, at_step=1, rank=1)
        spotfit.get_all_reported_checkpoints()
        wait_for_all_processes()
    return sorted(set(numpy.ravel(checkpointer.state["own"]).tolist()))


def wait_for_all_processes() -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("end")


def test_an_array_that_differs_between_processes_is_that_of_one_of_them(
    cloud: LiveTestCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    result = cloud.fit(train_apart, workers=2, max_failures=1, trainer_type=JaxTrainer)
    assert result.return_value in ([1.0], [2.0])
    assert capsys.readouterr().out.count("checkpoint.ranks_diverge parts=1") == 1


def train_until_notice(config: dict[str, Any]) -> int:
    """Return the restored step after a restart; before, train until the round ends."""
    weights = jax.numpy.zeros(2)
    checkpointer = Checkpointer({"weights": weights}, every="at_notice")
    restored = checkpointer.restore()
    if restored is not None:
        assert checkpointer.state["weights"].tolist() == [restored.step] * 2
        return restored.step
    while True:
        weights = weights + 1
        checkpointer.step({"weights": weights})
        Path(config["marks"], "stepping").touch()


def test_a_preemption_notice_causes_a_save(cloud: LiveTestCloud) -> None:
    run = cloud.submit(train_until_notice, workers=2, nodes=2, trainer_type=JaxTrainer)
    cloud.wait_for_mark("stepping")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=60.0)
    assert run.result(100).return_value > 0
    assert len(cloud.rounds_opened()) == 2


def test_ranks_that_return_at_different_times_end_the_run(cloud: LiveTestCloud) -> None:
    def return_late() -> int:
        rank = spotfit.get_context().get_world_rank()
        wait_for_all_processes()
        # Longer than the shutdown of JAX may take: nothing shows that its timeout has passed.
        time.sleep(2.0 if rank == 1 else 0.0)
        return rank

    environment = {"env_vars": {"JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S": "1"}}
    result = cloud.trainer(
        return_late, workers=2, trainer_type=JaxTrainer, worker_runtime_env=environment
    ).fit()
    assert result.return_value == 0
    assert len(cloud.rounds_opened()) == 1
