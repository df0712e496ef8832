"""Lightning in real workers: killed workers and machines do not change the result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import spotfit
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import IntegrityError
from spotfit.lightning import LightningTrainer
from spotfit.model.topology import NodeAssignment
from spotfit.torch import TorchTrainer
from tests.frameworks import lightning_digits
from tests.frameworks.lightning_digits import EPOCHS, STEPS, WORKERS, train
from tests.live.cloud import LiveTestCloud, eventually


def fit(cloud: LiveTestCloud, label: str, **config: Any) -> str:
    """Return the hash of the weights of one run on two machines."""
    kills = config.get("kills", [])
    result = cloud.fit(
        train,
        name=label,
        workers=WORKERS,
        nodes=2,
        trainer_type=LightningTrainer,
        max_failures=len(kills),
        config={"label": label, **config},
    )
    assert len(cloud.rounds_opened(label)) == len(kills) + 1
    return str(result.return_value)


def metrics(cloud: LiveTestCloud, label: str) -> list[dict[str, float]]:
    """Return what was logged at the end of each epoch."""
    return [
        json.loads((cloud.marks / f"metrics-{label}-{epoch}").read_text())
        for epoch in range(EPOCHS)
    ]


def restored(cloud: LiveTestCloud, label: str) -> dict[int, str]:
    """Return the steps from which the run has resumed, and where their states were read."""
    names = cloud.marks.glob(f"restored-{label}-*")
    return {int(path.name.rpartition("-")[2]): path.read_text() for path in names}


CASES: dict[str, dict[str, Any]] = {
    "lightning": {},
    "pytorch_lightning": {"package": "pytorch_lightning"},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "loader_workers": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_workers_do_not_change_weights_and_logged_values(
    cloud: LiveTestCloud, case: str
) -> None:
    config = CASES[case]
    undisturbed = fit(cloud, "undisturbed", **config)
    killed = fit(cloud, "killed", **config, kills=[[8, 1], [29, 3], [30, 0]])
    assert killed == undisturbed
    assert metrics(cloud, "killed") == metrics(cloud, "undisturbed")
    assert set(restored(cloud, "killed").values()) == {"memory"}
    assert 6 in restored(cloud, "killed"), "within the first epoch"


def test_a_lost_machine_does_not_change_weights_and_logged_values(cloud: LiveTestCloud) -> None:
    undisturbed = fit(cloud, "undisturbed")
    handle = cloud.submit(
        train,
        name="lost",
        workers=WORKERS,
        nodes=2,
        trainer_type=LightningTrainer,
        config={"label": "lost", "waits": [[22, 3]]},
    )
    cloud.wait_for_mark("waits-lost-22-3")
    nodes = cloud.rounds_opened("lost")[0].round.assignments
    (lost,) = (node for node in nodes if node.first_rank)
    eventually(lambda: 21 in replicated_steps(lost, by=nodes[nodes[0] is lost]))
    cloud.reclaimer.kill(cloud.node_of_rank(3, "lost"))
    assert handle.result(100).return_value == undisturbed
    assert metrics(cloud, "lost") == metrics(cloud, "undisturbed")
    assert restored(cloud, "lost") == {21: "memory"}


def replicated_steps(node: NodeAssignment, *, by: NodeAssignment) -> list[int]:
    """Return the steps of the snapshots of `node` of which the agent of `by` has copies."""
    copies = Path(f"/dev/shm/spotfit-{os.getuid()}-{by.agent}", "copies")  # noqa: S108 - the agent's directory
    steps = []
    for path in copies.glob(f"1-{node.first_rank}-*.segment"):
        try:
            steps.append(ShmSegment.open(path).index().step)
        except IntegrityError:  # the agent has removed it meanwhile
            continue
    return steps


def test_a_resized_group_trains_on_each_batch_of_the_epoch_once(cloud: LiveTestCloud) -> None:
    """Four ranks train 6 of 15 batches; two ranks the remaining 288 samples, in 18 of 30."""
    config = {"label": "run", "waits": [[6, 0], [6, 1], [6, 2], [6, 3]], "every": 1}
    handle = cloud.submit(
        lightning_digits.train_in_fixed_batches,
        workers=(2, 4),
        nodes=2,
        trainer_type=LightningTrainer,
        config=config,
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    for rank in range(4):
        cloud.wait_for_mark(f"waits-run-6-{rank}")
    cloud.reclaimer.set_capacity(1)
    cloud.reclaimer.kill(cloud.node_of_rank(3))
    batches = handle.result(100).return_value
    cloud.reclaimer.set_capacity(None)
    ((step, _source),) = restored(cloud, "run").items()
    left = (STEPS - step) * 2
    assert batches == [[0, left], *([epoch, 2 * STEPS] for epoch in range(1, EPOCHS))]


def train_unprepared(config: dict[str, Any]) -> None:
    """Train as on one machine; the script imports nothing of spotfit."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
    module = lightning_digits.make_module(pl, {**config, "label": "unprepared"})
    trainer.fit(module, DataLoader(lightning_digits.digits(0, 64), batch_size=8))


def test_an_unprepared_trainer_is_rejected_without_a_retry(cloud: LiveTestCloud) -> None:
    with pytest.raises(spotfit.TrainingFailedError, match="train a separate model") as raised:
        cloud.fit(train_unprepared, workers=2, trainer_type=TorchTrainer, max_failures=3)
    assert "strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()]" in str(raised.value)
    assert len(cloud.rounds_opened()) == 1


def test_reported_checkpoints_are_those_of_ray_train(cloud: LiveTestCloud) -> None:
    """One after each epoch, with metrics, epoch and step; a new run resumes by `ckpt_path`."""
    result = cloud.fit(
        lightning_digits.train_with_reports,
        workers=2,
        trainer_type=LightningTrainer,
        config={"epochs": 2},
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=None),
    )
    assert result.best_checkpoints is not None
    reported = [metrics for _, metrics in result.best_checkpoints]
    assert [(one["epoch"], one["step"]) for one in reported] == [(0, STEPS), (1, 2 * STEPS)]
    assert all(0 < one["val_loss"] < 3 for one in reported)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["checkpoint.ckpt"]
    resumed = cloud.fit(
        lightning_digits.train_with_reports,
        workers=2,
        trainer_type=LightningTrainer,
        config={"epochs": 3},
    )
    assert resumed.metrics is not None
    assert (resumed.metrics["epoch"], resumed.return_value) == (2, [2])
