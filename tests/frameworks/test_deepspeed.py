"""DeepSpeed in four real workers: runs with kills give the weights of an undisturbed run."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

deepspeed = pytest.importorskip("deepspeed")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import spotfit  # noqa: E402
from spotfit.client.trainer import TorchTrainer  # noqa: E402
from spotfit.deepspeed import initialize, load_checkpoint, report_checkpoint  # noqa: E402
from spotfit.model.events import FailureCause  # noqa: E402
from tests.frameworks.machine_kills import (  # noqa: E402
    Disturbance,
    kill_machine_of_rank,
    kill_own_worker,
    machine_kill,
    no_disturbance,
)
from tests.live.cloud import LiveTestCloud  # noqa: E402

STEPS = 24
STEPS_PER_CHECKPOINT = 5
BATCH_SIZE = 16


def training_function(disturbance: Disturbance) -> Any:
    def train(config: dict[str, Any]) -> str:
        """Train on digits with dropout; return the digest of all weights."""
        from sklearn.datasets import load_digits

        features, labels = load_digits(return_X_y=True)
        inputs, targets = torch.tensor(features / 16.0, dtype=torch.float32), torch.tensor(labels)
        rank = spotfit.get_context().get_world_rank()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
        engine, *_ = initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": BATCH_SIZE,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": config["stage"]},
            },
        )
        torch.manual_seed(rank)
        client_state = load_checkpoint(engine)
        assert (client_state or {"step": 0})["step"] == engine.global_steps
        for step in range(engine.global_steps, STEPS):
            disturbance(config, step)
            rows = torch.arange(BATCH_SIZE) + BATCH_SIZE * (4 * step + rank)
            loss = nn.functional.cross_entropy(
                engine(inputs[rows % len(inputs)]), targets[rows % len(inputs)]
            )
            engine.backward(loss)
            engine.step()
            if engine.global_steps % STEPS_PER_CHECKPOINT == 0:
                report_checkpoint(
                    engine, {"loss": loss.item()}, client_state={"step": engine.global_steps}
                )
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights = [weight.detach().float().numpy().tobytes() for weight in model.parameters()]
        return hashlib.sha256(b"".join(weights)).hexdigest()

    return train


def kills(config: dict[str, Any], step: int) -> None:
    kill_own_worker(config["marks"], step, at_step=13, rank=1)
    kill_own_worker(config["marks"], step, at_step=22, rank=0)


def trainer(
    cloud: LiveTestCloud, fn: Any, name: str, *, stage: int, workers: int = 4
) -> spotfit.DataParallelTrainer:
    return cloud.trainer(
        fn,
        workers=workers,
        nodes=2,
        max_failures=2,
        name=name,
        trainer_type=TorchTrainer,
        config={"stage": stage},
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 3])
def test_killed_workers_do_not_change_the_weights(cloud: LiveTestCloud, stage: int) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm", stage=stage).fit()
    stormy = trainer(cloud, training_function(kills), "stormy", stage=stage).fit()
    assert stormy.return_value == calm.return_value
    assert [one.cause for one in cloud.rounds_closed("stormy")] == [FailureCause.WORKER] * 2


@pytest.mark.timeout(300)
def test_a_killed_machine_does_not_change_the_weights(cloud: LiveTestCloud) -> None:
    calm = trainer(cloud, training_function(no_disturbance), "calm", stage=2).fit()
    run = trainer(cloud, training_function(machine_kill), "run", stage=2).submit()
    assert kill_machine_of_rank(cloud, 3, run).return_value == calm.return_value
    assert cloud.view("run").failure_counts == {FailureCause.PREEMPTION: 1}


def test_another_number_of_workers_is_rejected(cloud: LiveTestCloud) -> None:
    trainer(cloud, training_function(no_disturbance), "run", stage=1, workers=2).fit()
    with pytest.raises(spotfit.WorkerGroupError, match="saved by 2 workers; DeepSpeed cannot load"):
        trainer(cloud, training_function(no_disturbance), "run", stage=1, workers=1).fit()
