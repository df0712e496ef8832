"""DeepSpeed in four real workers: runs with kills give the weights of an undisturbed run."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed: make deepspeed")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import spotfit  # noqa: E402
from spotfit.client.trainer import TorchTrainer  # noqa: E402
from spotfit.deepspeed import (  # noqa: E402
    Checkpointer,
    initialize,
    load_checkpoint,
    report_checkpoint,
)
from spotfit.model.events import CheckpointCommitted, FailureCause  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    kill_machine_of_rank,
    kill_own_worker,
    machine_kill,
    no_disturbance,
)
from tests.live.cloud import LiveTestCloud, eventually  # noqa: E402

STEPS = 24
STEPS_PER_CHECKPOINT = 5
BATCH_SIZE = 16


def make_engine(config: dict[str, Any]) -> Any:
    """Return an engine with dropout and running means, which differ between ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    engine, *_ = initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": STEPS}},
            "zero_optimization": {
                "stage": config["stage"],
                "stage3_param_persistence_threshold": 100,
            },
        },
    )
    torch.manual_seed(spotfit.get_context().get_world_rank())
    return engine


def train_batch(engine: Any, step: int) -> float:
    """Train one batch of digits and return the loss."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(features / 16.0, dtype=torch.float32), torch.tensor(labels)
    first = BATCH_SIZE * (4 * step + spotfit.get_context().get_world_rank())
    rows = torch.arange(first, first + BATCH_SIZE) % len(inputs)
    loss = nn.functional.cross_entropy(engine(inputs[rows]), targets[rows])
    engine.backward(loss)
    engine.step()
    return loss.item()


def digest_of(engine: Any) -> str:
    """Return a digest of the weights, and of this rank's running means. A collective."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        parts = [one.detach().float().numpy().tobytes() for one in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def training_function(disturbance: Disturbance, *, saves: str = "snapshots") -> Any:
    def train(config: dict[str, Any]) -> Any:
        """Train with one of both ways to save; return the digests of all ranks."""
        engine = make_engine(config)
        checkpointer = None
        if saves == "snapshots":
            checkpointer = Checkpointer(engine, every=STEPS_PER_CHECKPOINT)
            restored = checkpointer.restore()
            record(config, f"{restored.step} {restored.source}" if restored else "0")
        else:
            client_state = load_checkpoint(engine)
            assert (client_state or {"step": 0})["step"] == engine.global_steps
        for step in range(engine.global_steps, STEPS):
            disturbance(config, step)
            metrics = {"loss": train_batch(engine, step)}
            if checkpointer is not None:
                checkpointer.step(metrics)
            elif engine.global_steps % STEPS_PER_CHECKPOINT == 0:
                report_checkpoint(engine, metrics, client_state={"step": engine.global_steps})
        digests: list[Any] = [None] * spotfit.get_context().get_world_size()
        torch.distributed.all_gather_object(digests, digest_of(engine))
        return digests

    return train


def train_until_replaced(config: dict[str, Any]) -> Any:
    """Train until a machine is replaced, and then four steps; return the steps and a digest."""
    engine = make_engine(config)
    checkpointer = Checkpointer(engine, every="at_notice", save_at_end=False)
    restored = checkpointer.restore()
    last = config.get("stops_at") or (restored.step + 4 if restored else 10**6)
    while checkpointer.steps < last:
        checkpointer.step({"loss": train_batch(engine, checkpointer.steps)})
        if checkpointer.steps == 3:
            Path(config["marks"], f"trains-{spotfit.get_context().get_world_rank()}").touch()
        if "stops_at" not in config:
            time.sleep(0.05)
    return last, digest_of(engine)


def allow_processors(strategy: Any) -> None:
    """Lightning refuses its DeepSpeed strategy without GPUs; nothing in it depends on them."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed as lightning_strategy

    lightning_strategy.CUDAAccelerator = CPUAccelerator
    lightning_strategy._validate_device_index_selection = lambda _: None
    strategy.root_device = property(lambda _: torch.device("cpu", 0))


def train_with_lightning(config: dict[str, Any]) -> str:
    """Fit a module by Lightning, and kill rank 1 once; return the digest of the weights."""
    import lightning.pytorch as pl

    from spotfit.lightning import (
        CheckpointerCallback,
        RayDeepSpeedStrategy,
        RayLightningEnvironment,
    )

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.3), nn.Linear(32, 2))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Kill(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if config["kills"]:
                batches = trainer.fit_loop.total_batch_idx + 1
                kill_own_worker(config["marks"], batches, at_step=9, rank=1)

    allow_processors(RayDeepSpeedStrategy)
    torch.manual_seed(0)
    module = Regression()
    rows = torch.utils.data.TensorDataset(torch.arange(384.0).view(96, 4) / 384)
    checkpoints = CheckpointerCallback(every=3)
    trainer = pl.Trainer(
        strategy=RayDeepSpeedStrategy(stage=config["stage"]),
        accelerator="cpu",
        devices="auto",
        max_epochs=3,
        limit_train_batches=config["epoch_batches"],
        accumulate_grad_batches=config["accumulated"],
        plugins=[RayLightningEnvironment()],
        callbacks=[checkpoints, Kill()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True))
    if checkpoints.restored is not None:
        record(config, f"{checkpoints.restored.step} {checkpoints.restored.source}")
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        parts = [one.detach().numpy().tobytes() for one in module.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def record(config: dict[str, Any], line: str) -> None:
    """Append a line to the records of the run, on rank 0."""
    context = spotfit.get_context()
    if context.get_world_rank() == 0:
        with Path(config["marks"], f"restored-{context.get_experiment_name()}").open("a") as file:
            file.write(f"{line}\n")


def restored(cloud: LiveTestCloud, name: str) -> list[str]:
    """Return the steps and sources from which the rounds of a run began."""
    return (cloud.marks / f"restored-{name}").read_text().splitlines()


def kills(config: dict[str, Any], step: int) -> None:
    kill_own_worker(config["marks"], step, at_step=13, rank=1)
    kill_own_worker(config["marks"], step, at_step=22, rank=0)


def trainer(
    cloud: LiveTestCloud, fn: Any, name: str, *, workers: int = 4, **config: Any
) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn,
        workers=workers,
        nodes=2,
        max_failures=2,
        name=name,
        trainer_type=TorchTrainer,
        config=config,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_workers_resume_from_memory_with_the_same_weights(
    cloud: LiveTestCloud, stage: int
) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm", stage=stage).fit()
    stormy = trainer(cloud, training_function(kills), "stormy", stage=stage).fit()
    assert stormy.return_value == calm.return_value
    assert len(set(stormy.return_value)) == 4, "running means of each rank"
    assert [one.cause for one in cloud.rounds_closed("stormy")] == [FailureCause.WORKER] * 2
    assert restored(cloud, "stormy") == ["0", "10 memory", "20 memory"]
    commits = [one for one in cloud.events("calm") if isinstance(one, CheckpointCommitted)]
    assert [one.step for one in commits] == [5, 10, 15, 20, STEPS]


@pytest.mark.timeout(300)
def test_reported_checkpoints_of_killed_workers_give_the_same_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance, saves="files"), "calm", stage=3).fit()
    stormy = trainer(cloud, training_function(kills, saves="files"), "stormy", stage=3).fit()
    # DeepSpeed saves the running means of rank 0 only.
    assert stormy.return_value[0] == calm.return_value[0]
    assert [one.cause for one in cloud.rounds_closed("stormy")] == [FailureCause.WORKER] * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_machine_does_not_change_the_weights(cloud: LiveTestCloud, stage: int) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm", stage=stage).fit()
    run = trainer(cloud, training_function(machine_kill), "run", stage=stage).submit()
    assert kill_machine_of_rank(cloud, 3, run).return_value == calm.return_value
    assert cloud.view("run").failure_counts == {FailureCause.PREEMPTION: 1}
    assert [line.split()[0] for line in restored(cloud, "run")] == ["0", "15"]


@pytest.mark.timeout(300)
def test_after_the_loss_of_all_machines_the_bucket_is_restored(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm", stage=3).fit()
    run = trainer(cloud, training_function(machine_kill), "run", stage=3).submit()
    for rank in (0, 3):
        cloud.wait_for_mark(f"waiting-{rank}")
    eventually(lambda: len(cloud.view("run").checkpoints) == 3)
    for node in [cloud.node_of_rank(rank, "run") for rank in (0, 3)]:
        cloud.reclaimer.kill(node)
    cloud.write_mark("machine-killed")
    assert run.result().return_value == calm.return_value
    assert restored(cloud, "run") == ["0", "15 bucket"]


@pytest.mark.timeout(300)
def test_a_preemption_notice_saves_the_training(cloud: LiveTestCloud) -> None:
    run = trainer(cloud, train_until_replaced, "run", stage=2).submit()
    for rank in range(4):
        cloud.wait_for_mark(f"trains-{rank}")
    cloud.reclaimer.notify(cloud.node_of_rank(3, "run"), seconds_left=60.0)
    last, digest = run.result(200).return_value
    (closed,) = cloud.rounds_closed("run")
    assert closed.reason == "checkpoint saved after the preemption notice; replacement ready"
    calm = trainer(cloud, train_until_replaced, "calm", stage=2, stops_at=last).fit()
    assert calm.return_value == (last, digest)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stage", "accumulated", "epoch_batches", "saved_step"),
    [
        (3, 1, 6, 6),
        # The engine counts accumulated batches across epochs, Lightning in each.
        (2, 2, 5, 8),
    ],
)
def test_lightning_resumes_within_an_epoch_with_the_same_weights(
    cloud: LiveTestCloud, stage: int, accumulated: int, epoch_batches: int, saved_step: int
) -> None:
    config = {"stage": stage, "accumulated": accumulated, "epoch_batches": epoch_batches}
    calm = trainer(cloud, train_with_lightning, "calm", kills=False, **config).fit()
    stormy = trainer(cloud, train_with_lightning, "stormy", kills=True, **config).fit()
    assert stormy.return_value == calm.return_value
    assert restored(cloud, "stormy") == [f"{saved_step} memory"]


@pytest.mark.parametrize(
    ("saves", "message"),
    [
        ("snapshots", "saved by 2 workers; ZeRO's partitions cannot be restored by 1"),
        ("files", "saved by 2 workers; DeepSpeed cannot load"),
    ],
)
def test_another_number_of_workers_is_rejected(
    cloud: LiveTestCloud, saves: str, message: str
) -> None:
    fn = training_function(no_disturbance, saves=saves)
    trainer(cloud, fn, "run", stage=1, workers=2).fit()
    with pytest.raises(spotfit.WorkerGroupError, match=message):
        trainer(cloud, fn, "run", stage=1, workers=1).fit()
