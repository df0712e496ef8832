"""Checkpointer in real processes: failures, resizes and corruption do not change the result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotfit
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.client.console import read_event_lines
from spotfit.client.run_handle import RunHandle
from spotfit.client.trainer import TorchTrainer
from spotfit.core.errors import (
    ConfigError,
    IntegrityError,
    RunCancelledError,
    TimeBudgetExceededError,
)
from spotfit.model.events import CheckpointCommitted
from spotfit.model.topology import NodeAssignment, SnapshotId
from spotfit.store.factory import open_store
from spotfit.torch import Checkpointer, init_module, prepare_data_loader, prepare_model
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]
SAMPLES = 96
EPOCHS = 2
STEPS = 8
"""Steps per epoch, independent of the number of workers."""


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that contain their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((8,), index / SAMPLES)


def train(config: Config) -> list[list[float]]:
    """Train two epochs with dropout, momentum and a schedule; return the unsharded weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    world_size = spotfit.get_context().get_world_size()
    rank = spotfit.get_context().get_world_rank()
    marks = Path(config["marks"])
    torch.manual_seed(0)
    dropout = nn.Dropout(config["dropout"])
    norm = nn.BatchNorm1d(64) if config.get("norm") else nn.Identity()
    with init_module():
        module = nn.Sequential(nn.Linear(8, 64), norm, dropout, nn.Linear(64, 64), nn.Linear(64, 1))
        model = prepare_model(module, parallel_strategy=config["strategy"])
    is_initialized = not any(weight.isnan().any() for weight in model.parameters())
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    batch = SAMPLES // STEPS // world_size
    loader = prepare_data_loader(DataLoader(Numbered(), batch_size=batch, shuffle=True))
    ckpt = Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        every=config.get("every", 3),
    )
    restored = ckpt.restore()
    (marks / f"resumed-{config['label']}").write_text(str(restored.step if restored else 0))
    (marks / f"initialized-{config['label']}").write_text(str(is_initialized))
    (marks / f"source-{config['label']}").write_text(restored.source if restored else "")
    for epoch in range(restored.epoch if restored else 0, EPOCHS):
        if world_size > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for indices, inputs in loader:
            loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            samples = marks / f"samples-{config['label']}-{epoch}-{ckpt.steps + 1}-{rank}"
            samples.write_text(" ".join(str(int(index)) for index in indices))
            ckpt.step({"loss": loss.item()})
            interrupt_at(ckpt.steps, config, rank)
    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [weight.flatten().tolist() for weight in weights.values()] if rank == 0 else []


def interrupt_at(step: int, config: Config, rank: int) -> None:
    """Stop at the configured step: by an error, by waiting, or once by a signal."""
    if step == config.get("stops_at"):
        raise RuntimeError("stopped")
    if step == config.get("waits_at") and rank == 1:
        (Path(config["marks"]) / "waits").touch()
        signal.pause()
    killed = Path(config["marks"]) / "killed"
    if step == config.get("killed_at") and rank == 0 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit(cloud: LiveTestCloud, name: str, *, workers: int = 2, **config: Any) -> Any:
    """Return the weights of one `fit` call, or None if it was stopped."""
    config = {"strategy": "ddp", "dropout": 0.1, "label": name, **config}
    run = config.pop("run", name)
    try:
        return cloud.fit(
            train,
            workers=workers,
            name=run,
            trainer_type=TorchTrainer,
            max_failures=1 if "killed_at" in config else 0,
            config=config,
        ).return_value
    except spotfit.WorkerGroupError as error:
        if "stopped" not in str(error):
            raise
        return None


def resumed_step(cloud: LiveTestCloud, name: str) -> int:
    """Return the step from which the training with that label resumed last."""
    return int((cloud.marks / f"resumed-{name}").read_text())


def trained_samples(cloud: LiveTestCloud, name: str, *, epoch: int, steps: range) -> Counter[str]:
    """Return the samples that all ranks trained on in these steps."""
    patterns = [f"samples-{name}-{epoch}-{step}-*" for step in steps]
    files = [path for pattern in patterns for path in cloud.marks.glob(pattern)]
    return Counter(index for path in files for index in path.read_text().split())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_killed_training_ends_with_the_weights_of_an_undisturbed_one(
    cloud: LiveTestCloud, strategy: str
) -> None:
    undisturbed = fit(cloud, "undisturbed", strategy=strategy, norm=True)
    killed = fit(cloud, "killed", strategy=strategy, norm=True, killed_at=11)
    assert len(cloud.rounds_closed("killed")) == 1
    assert resumed_step(cloud, "killed") == 9, "from the third snapshot"
    names = ("undisturbed", "killed")
    initialized = [(cloud.marks / f"initialized-{name}").read_text() for name in names]
    assert initialized == ["True", "False"], "the restarted worker must not draw random weights"
    assert killed == undisturbed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_that_returns_before_a_save_is_due_ends_with_its_last_step(
    cloud: LiveTestCloud, strategy: str
) -> None:
    def train_seven_steps(config: Config) -> None:
        model = prepare_model(nn.Linear(8, 64), parallel_strategy=config["strategy"])
        optimizer = torch.optim.Adam(model.parameters())
        ckpt = Checkpointer(model=model, optimizer=optimizer, every="10m")
        ckpt.restore()
        spotfit.report({"loss": 9.0})
        for step in range(7):
            optimizer.zero_grad()
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
            ckpt.step({"loss": float(step)})
        torch.distributed.destroy_process_group()

    config = {"strategy": strategy}
    result = cloud.fit(
        train_seven_steps, workers=2, name="run", trainer_type=TorchTrainer, config=config
    )
    assert result.checkpoint is not None
    assert [index.step for index in result.checkpoint.open_snapshot().indices] == [7, 7]
    commits = [event for event in cloud.events() if isinstance(event, CheckpointCommitted)]
    assert [(commit.step, commit.metrics) for commit in commits] == [(7, {"loss": 6.0})]
    assert result.metrics == {"loss": 9.0}, "the last reported"


def test_ranks_that_return_at_different_steps_end_without_a_wait(
    cloud: LiveTestCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_unevenly(config: Config) -> str:
        rank = spotfit.get_context().get_world_rank()
        ckpt = Checkpointer(model=nn.Linear(2, 2), every="10m")
        ckpt.restore()
        ckpt.step()
        ckpt.save()
        for _ in range(3 + rank):
            ckpt.step()
        if rank == 0:
            spotfit.get_all_reported_checkpoints()
        return "done"

    result = cloud.fit(train_unevenly, workers=2, name="run", trainer_type=TorchTrainer)
    assert result.return_value == "done"
    assert "rank 0 ended at step 4, rank 1 at step 5; the steps after 1 are in no checkpoint" in (
        capsys.readouterr().err
    )


def train_until_ended(config: Config) -> None:
    """Train without an end in the first run; only restore in the next one."""
    model = prepare_model(nn.Linear(2, 2))
    ckpt = Checkpointer(model=model, every=10**6)
    restored = ckpt.restore()
    (Path(config["marks"]) / "resumed").write_text(str(restored.step if restored else 0))
    for _ in range(10**6 if restored is None else 0):
        time.sleep(0.01)
        ckpt.step()
        (Path(config["marks"]) / "step").write_text(str(ckpt.steps))


def test_a_cancelled_run_loses_no_step(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(train_until_ended, workers=2, name="run", trainer_type=TorchTrainer)
    cloud.wait_for_mark("step")
    at_request = int((cloud.marks / "step").read_text() or 1)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(60)
    cloud.fit(train_until_ended, workers=2, name="run", trainer_type=TorchTrainer)
    assert int((cloud.marks / "resumed").read_text()) >= at_request


def test_a_run_that_is_ended_by_its_time_budget_saves_and_resumes(cloud: LiveTestCloud) -> None:
    options: dict[str, Any] = {"workers": 2, "name": "run", "trainer_type": TorchTrainer}
    with pytest.raises(TimeBudgetExceededError, match="time budget of 45 s is used up"):
        cloud.fit(train_until_ended, time_budget_s=45.0, **options)
    saved = cloud.view().latest_checkpoint
    assert saved is not None
    assert saved.step is not None
    cloud.fit(train_until_ended, **options)
    assert int((cloud.marks / "resumed").read_text()) == saved.step > 0


def test_workers_killed_right_after_a_snapshot_resume_from_memory(cloud: LiveTestCloud) -> None:
    """The snapshot was not uploaded yet, but is still in the memory of their machine."""
    undisturbed = fit(cloud, "undisturbed")
    killed = fit(cloud, "killed", killed_at=9)
    assert resumed_step(cloud, "killed") == 9
    assert (cloud.marks / "source-killed").read_text() == "memory"
    assert cloud.rounds_opened("killed")[-1].round.memory_snapshot == SnapshotId(round=1, step=9)
    assert killed == undisturbed


def test_the_replacement_of_a_lost_machine_resumes_from_the_copy_of_its_peer(
    cloud: LiveTestCloud,
) -> None:
    undisturbed = on_two_machines(cloud, "undisturbed").result(120).return_value
    handle = on_two_machines(cloud, "lost", waits_at=9)
    cloud.wait_for_mark("waits")
    nodes = cloud.rounds_opened("lost")[0].round.assignments
    eventually(lambda: 9 in replicated_steps(nodes[1], by=nodes[0]))
    cloud.reclaimer.kill(cloud.node_of_rank(1, "lost"))

    assert handle.result(120).return_value == undisturbed
    assert resumed_step(cloud, "lost") == 9
    assert (cloud.marks / "source-lost").read_text() == "memory"
    state = cloud.rounds_opened("lost")[-1].round
    assert (state.memory_snapshot, state.shard_holders) == (
        SnapshotId(round=1, step=9),
        ((nodes[0].agent,),) * 2,
    )


def on_two_machines(cloud: LiveTestCloud, name: str, **config: Any) -> RunHandle:
    config = {"strategy": "ddp", "dropout": 0.1, "label": name, **config}
    return cloud.submit(
        train, workers=2, nodes=2, trainer_type=TorchTrainer, name=name, config=config
    )


def replicated_steps(node: NodeAssignment, *, by: NodeAssignment) -> list[int]:
    """Return the steps of the snapshots of `node` of which the agent of `by` has copies."""
    copies = Path(f"/dev/shm/spotfit-{os.getuid()}-{by.agent}", "copies")  # noqa: S108 - the agent's directory
    steps = []
    for path in copies.glob(f"1-{node.first_rank}-*.segment"):
        with suppress(IntegrityError):  # the agent has removed it meanwhile
            steps.append(ShmSegment.open(path).index().step)
    return steps


def test_resized_groups_train_on_each_sample_once_and_end_with_the_same_weights(
    cloud: LiveTestCloud,
) -> None:
    undisturbed = fit(cloud, "undisturbed", workers=1, dropout=0.0)
    fit(cloud, "four", run="run", workers=4, dropout=0.0, stops_at=4)
    fit(cloud, "two", run="run", workers=2, dropout=0.0, stops_at=11)
    resized = fit(cloud, "three", run="run", workers=3, dropout=0.0)

    assert (resumed_step(cloud, "two"), resumed_step(cloud, "three")) == (3, 9)
    first_epoch = trained_samples(cloud, "four", epoch=0, steps=range(1, 4))
    first_epoch += trained_samples(cloud, "two", epoch=0, steps=range(4, 9))
    second_epoch = trained_samples(cloud, "two", epoch=1, steps=range(9, 10))
    second_epoch += trained_samples(cloud, "three", epoch=1, steps=range(10, 17))
    each_once = Counter(str(index) for index in range(SAMPLES))
    assert (first_epoch, second_epoch) == (each_once, each_once)
    for weights, expected in zip(resized, undisturbed, strict=True):
        assert weights == pytest.approx(expected, abs=1e-4)


def test_events_and_status_contain_the_reason_of_each_save(cloud: LiveTestCloud) -> None:
    fit(cloud, "reasons", every=[5, "epoch"])
    reasons = ["5 steps since the last save", "an epoch has ended"] * 2
    assert [checkpoint.reason for checkpoint in cloud.view("reasons").checkpoints] == reasons
    lines = [
        line for line in read_event_lines(open_store(cloud.url("reasons"))) if "committed" in line
    ]
    assert all(reason in line for reason, line in zip(reasons, lines, strict=True))
    assert spotfit.attach(cloud.url("reasons")).status().save_reason == reasons[-1]


def test_after_a_flipped_bit_the_previous_checkpoint_is_restored(cloud: LiveTestCloud) -> None:
    undisturbed = fit(cloud, "undisturbed")
    fit(cloud, "stopped", run="run", stops_at=11)
    newest = cloud.view("run").checkpoints[-1].name
    chunk = next(Path(cloud.storage, "run", newest, "chunks").iterdir())
    body = bytearray(chunk.read_bytes())
    body[len(body) // 2] ^= 1
    chunk.write_bytes(body)
    again = fit(cloud, "again", run="run")
    assert resumed_step(cloud, "again") == 6
    assert again == undisturbed


def train_and_roll_back(config: Config) -> list[Any]:
    """Save three times, roll back to the last save and exit; then return what was restored."""
    model = prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model=model, optimizer=optimizer, every=2)
    restored = ckpt.restore()
    if restored is not None:
        return [restored.step, restored.source]
    for _ in range(7):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
    eventually((Path(config["marks"]) / "roll-back").exists)
    rolled_back = ckpt.restore()
    assert rolled_back is not None
    assert (rolled_back.step, ckpt.steps) == (6, 6)
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_steps_that_were_rolled_back_are_not_restored_later(cloud: LiveTestCloud) -> None:
    """Neither from the machine's memory nor from a peer's copy."""
    handle = cloud.submit(
        train_and_roll_back,
        workers=2,
        nodes=2,
        name="back",
        trainer_type=TorchTrainer,
        max_failures=1,
    )
    eventually(lambda: bool(cloud.rounds_opened("back")))
    one, other = cloud.rounds_opened("back")[0].round.assignments
    eventually(lambda: 6 in replicated_steps(one, by=other))
    eventually(lambda: 6 in replicated_steps(other, by=one))
    cloud.write_mark("roll-back")
    assert handle.result(120).return_value == [6, "bucket"]


def save_on_one_rank(config: Config) -> None:
    """Call a collective method on rank 0 only, as a program would that uses torch.save."""
    is_rank_zero = spotfit.get_context().get_world_rank() == 0
    if is_rank_zero or config["from"] != "Checkpointer":
        ckpt = Checkpointer(model=nn.Linear(4, 1))
        if is_rank_zero and config["from"] == "Checkpointer.save":
            ckpt.save()
        elif is_rank_zero:
            ckpt.restore()


@pytest.mark.parametrize("call", ["Checkpointer", "Checkpointer.restore", "Checkpointer.save"])
def test_ranks_that_do_not_arrive_at_a_checkpointer_are_named(
    cloud: LiveTestCloud, call: str
) -> None:
    with pytest.raises(
        spotfit.WorkerGroupError, match=f"{call} on rank 0 cannot complete: rank 1 returned"
    ):
        cloud.fit(
            save_on_one_rank,
            workers=2,
            name="alone",
            trainer_type=TorchTrainer,
            max_failures=0,
            config={"from": call},
        )


def train_and_move(config: Config) -> list[Any]:
    """Save, or restore with the second rank's counter passed as another argument."""
    torch.manual_seed(config["seed"])
    model, counter = nn.Linear(4, 1), torch.optim.lr_scheduler.StepLR(_sgd(), 1)
    moved = config["moves"] and spotfit.get_context().get_world_rank() == 1
    stateful: Config = {"extra" if moved else "per_rank": {"counter": counter}}
    ckpt = Checkpointer(model=prepare_model(model), **stateful)
    before = [weight.tolist() for weight in model.parameters()]
    try:
        ckpt.restore()
    except ConfigError as error:
        ranks = torch.ones(1)
        torch.distributed.all_reduce(ranks)
        is_unchanged = before == [weight.tolist() for weight in model.parameters()]
        return [error.message, int(ranks), is_unchanged]
    ckpt.save()
    return []


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


def test_mismatch_on_one_rank_is_raised_by_all_ranks(
    cloud: LiveTestCloud,
) -> None:
    def fit_moved(seed: int, *, moves: bool) -> Any:
        config = {"seed": seed, "moves": moves}
        options: Config = {
            "workers": 2,
            "name": "moved",
            "trainer_type": TorchTrainer,
            "config": config,
        }
        return cloud.fit(train_and_move, **options).return_value

    fit_moved(0, moves=False)
    message, *outcome = fit_moved(1, moves=True)
    assert outcome == [2, True]
    assert "'counter' was saved under per_rank= but is passed as extra=" in message


def train_a_stream(config: Config) -> None:
    """Each rank has a position in a stream, which only the same number of ranks can restore."""
    position = torch.optim.lr_scheduler.StepLR(_sgd(), 1)
    Checkpointer(model=nn.Linear(4, 1), per_rank={"position": position}).restore()


def test_per_rank_state_in_an_elastic_group_is_rejected_without_a_retry(
    cloud: LiveTestCloud,
) -> None:
    handle = cloud.submit(
        train_a_stream, workers=(1, 2), nodes=2, trainer_type=TorchTrainer, max_failures=-1
    )
    with pytest.raises(spotfit.WorkerGroupError, match="lets the group change its size"):
        handle.result(120)
    assert any(failure.is_permanent for failure in cloud.rounds_closed()[-1].failures)


GUIDE = Path(__file__).parents[2] / "docs/guides/checkpointer.md"


def average_the_weights(config: Config) -> dict[str, list[float]]:
    """Set all weights to the step number after each step; return their average."""
    code: Config = {}
    exec(config["example"], code)  # noqa: S102 - as a reader of the guide would copy it
    is_distributed = spotfit.get_context().get_world_size() > 1
    module = nn.Linear(4, 6)
    for weight in module.parameters():
        nn.init.zeros_(weight)
    model = prepare_model(module, parallel_strategy=config["strategy"] if is_distributed else None)
    average = code["WeightAverage"](model)
    ckpt = code["make_checkpointer"](model, torch.optim.SGD(model.parameters()), average)
    ckpt.restore()
    while ckpt.steps < config["until"]:
        for weight in model.parameters():
            nn.init.constant_(weight, ckpt.steps + 1)
        average.update(model)
        ckpt.step()
    ckpt.save()
    shadow = average.shadow.items()
    tensors = {name: getattr(one, "full_tensor", one.clone)() for name, one in shadow}
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_average_of_the_guide_is_restored_at_every_world_size(
    cloud: LiveTestCloud, strategy: str
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "class WeightAverage" in block]
    averages = {0: 0.0}
    for step in range(1, 7):
        averages[step] = averages[step - 1] + 0.01 * (step - averages[step - 1])
    for workers, until in ((2, 2), (1, 4), (2, 6)):
        config = {"example": example, "strategy": strategy, "until": until}
        options: Config = {"workers": workers, "trainer_type": TorchTrainer, "config": config}
        result = cloud.fit(average_the_weights, **options).return_value
        assert result.keys() == {"weight", "bias"}
        for values in result.values():
            assert values == pytest.approx([averages[until]] * len(values), rel=1e-4)


class Slow:
    """An object whose state_dict takes a long time."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self._duration_s)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def train_until_noticed(config: Config) -> int:
    """Save step 1, and each step after a preemption notice, rank 1 later than rank 0.

    Returns the restored step after a restart.
    """
    rank = spotfit.get_context().get_world_rank()
    model = nn.Linear(4, 1)
    ckpt = Checkpointer(model=model, every=1000, per_rank={"slow": Slow(rank)})
    restored = ckpt.restore()
    if restored is not None:
        return restored.step
    ckpt.step()
    ckpt.save()
    Path(config["marks"], f"saved by {rank}").touch()
    while spotfit.get_preemption_info() is None:
        time.sleep(0.05)
    while True:  # until the round ends
        ckpt.step()
        time.sleep(0.2)
        ckpt.save()


def test_preempted_machine_finishes_its_save_with_relaxed_collectives(
    cloud: LiveTestCloud,
) -> None:
    """A checkpoint that lacks a rank's part must never be committed."""
    handle = cloud.submit(
        train_until_noticed,
        workers=2,
        nodes=2,
        trainer_type=TorchTrainer,
        failure_config=spotfit.FailureConfig(relax_collectives_on_preemption=True),
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=1),
    )
    cloud.wait_for_mark("saved by 0")
    cloud.wait_for_mark("saved by 1")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=60.0)
    assert handle.result(120).return_value > 1
    committed = [event for event in cloud.events() if isinstance(event, CheckpointCommitted)]
    assert {event.ranks for event in committed} == {(0, 1)}
