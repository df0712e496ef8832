"""Checkpointer in real processes: killed, shrunk, grown or damaged, a training ends as it would."""

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
from spotfit.checkpoint.segment import Segment
from spotfit.client.handle import RunHandle
from spotfit.client.story import read_story
from spotfit.client.trainers import TorchTrainer
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.model.events import CheckpointCommitted
from spotfit.model.holding import State
from spotfit.model.world import Place
from spotfit.store.opening import open_store
from spotfit.torch import Checkpointer, init_module, prepare_data_loader, prepare_model
from tests.live.cloud import Cloud, eventually

Config = dict[str, Any]
SAMPLES = 96
EPOCHS = 2
STEPS = 8
"""Of an epoch, however many take them."""


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[int, torch.Tensor]:
        return place, torch.full((8,), place / SAMPLES)


def train(config: Config) -> list[list[float]]:
    """Two epochs with dropout, momentum and a schedule; the weights at the end, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    world_size = spotfit.get_context().get_world_size()
    rank = spotfit.get_context().get_world_rank()
    marks = Path(config["marks"])
    torch.manual_seed(0)
    dropout = nn.Dropout(config["dropout"])
    norm = nn.BatchNorm1d(64) if config.get("norm") else nn.Identity()
    with init_module():
        blank = nn.Sequential(nn.Linear(8, 64), norm, dropout, nn.Linear(64, 64), nn.Linear(64, 1))
        model = prepare_model(blank, parallel_strategy=config["strategy"])
    drawn = not any(weight.isnan().any() for weight in model.parameters())
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
    (marks / f"begun-{config['life']}").write_text(str(restored.step if restored else 0))
    (marks / f"drawn-{config['life']}").write_text(str(drawn))
    (marks / f"source-{config['life']}").write_text(restored.source if restored else "")
    for epoch in range(restored.epoch if restored else 0, EPOCHS):
        if world_size > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for places, inputs in loader:
            loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen = marks / f"seen-{config['life']}-{epoch}-{ckpt.steps + 1}-{rank}"
            seen.write_text(" ".join(str(int(place)) for place in places))
            ckpt.step({"loss": loss.item()})
            come_to(ckpt.steps, config, rank)
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [weight.flatten().tolist() for weight in whole.values()] if rank == 0 else []


def come_to(step: int, config: Config, rank: int) -> None:
    """Some lives end there: by a signal, the first time one comes there, or with an error."""
    if step == config.get("stops_at"):
        raise RuntimeError("stopped")
    if step == config.get("waits_at") and rank == 1:
        (Path(config["marks"]) / "waits").touch()
        signal.pause()
    dies = Path(config["marks"]) / "died"
    if step == config.get("dies_at") and rank == 0 and not dies.exists():
        dies.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def life(cloud: Cloud, name: str, *, workers: int = 2, **config: Any) -> Any:
    """What one `fit` gave: the weights, or None where it was stopped."""
    config = {"strategy": "ddp", "dropout": 0.1, "life": name, **config}
    run = config.pop("run", name)
    try:
        return cloud.fit(
            train,
            workers=workers,
            name=run,
            kind=TorchTrainer,
            max_failures=1 if "dies_at" in config else 0,
            config=config,
        ).return_value
    except spotfit.WorkerGroupError as stopped:
        if "stopped" not in str(stopped):
            raise
        return None


def begun(cloud: Cloud, name: str) -> int:
    """The step that life went on from last."""
    return int((cloud.marks / f"begun-{name}").read_text())


def seen(cloud: Cloud, name: str, epoch: int, steps: range) -> Counter[str]:
    """Which samples all ranks of that life took in those steps."""
    files = [path for step in steps for path in cloud.marks.glob(f"seen-{name}-{epoch}-{step}-*")]
    return Counter(place for path in files for place in path.read_text().split())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_killed_training_ends_as_an_undisturbed_one(cloud: Cloud, strategy: str) -> None:
    undisturbed = life(cloud, "calm", strategy=strategy, norm=True)
    killed = life(cloud, "killed", strategy=strategy, norm=True, dies_at=11)
    assert len(cloud.closed("killed")) == 1
    assert begun(cloud, "killed") == 9, "from the third snapshot"
    told = [(cloud.marks / f"drawn-{name}").read_text() for name in ("calm", "killed")]
    assert told == ["True", "False"], "the second life's weights are the checkpoint's alone"
    assert killed == undisturbed


def test_workers_killed_right_after_a_snapshot_go_on_from_memory(cloud: Cloud) -> None:
    """Nobody had the time to bring it to the bucket: their machine remembers it."""
    undisturbed = life(cloud, "calm")
    killed = life(cloud, "killed", dies_at=9)
    assert begun(cloud, "killed") == 9
    assert (cloud.marks / "source-killed").read_text() == "memory"
    assert cloud.opened("killed")[-1].round.memory == State(1, 9)
    assert killed == undisturbed


def test_a_lost_machine_is_replaced_and_goes_on_from_what_its_peer_has_kept(cloud: Cloud) -> None:
    undisturbed = on_two_machines(cloud, "calm").result(120).return_value
    handle = on_two_machines(cloud, "lost", waits_at=9)
    cloud.sees("waits")
    places = cloud.opened("lost")[0].round.places
    eventually(lambda: 9 in steps_kept_for(places[1], by=places[0]))
    cloud.reclaimer.kill(cloud.node_of_rank(1, "lost"))

    assert handle.result(120).return_value == undisturbed
    assert begun(cloud, "lost") == 9
    assert (cloud.marks / "source-lost").read_text() == "memory"
    state = cloud.opened("lost")[-1].round
    assert (state.memory, state.holders) == (State(1, 9), ((places[0].agent,),) * 2)


def on_two_machines(cloud: Cloud, name: str, **config: Any) -> RunHandle:
    config = {"strategy": "ddp", "dropout": 0.1, "life": name, **config}
    return cloud.submit(train, workers=2, nodes=2, kind=TorchTrainer, name=name, config=config)


def steps_kept_for(machine: Place, *, by: Place) -> list[int]:
    """Of which states that machine's agent keeps copies."""
    copies = Path(f"/dev/shm/spotfit-{os.getuid()}-{by.agent}", "copies")  # noqa: S108 - where it is
    found = []
    for path in copies.glob(f"1-{machine.first_rank}-*.segment"):
        with suppress(IntegrityError):  # freed meanwhile
            found.append(Segment.open(path).index().step)
    return found


def test_however_many_go_on_they_learn_the_same_from_each_sample_once(cloud: Cloud) -> None:
    undisturbed = life(cloud, "calm", workers=1, dropout=0.0)
    life(cloud, "four", run="run", workers=4, dropout=0.0, stops_at=4)
    life(cloud, "two", run="run", workers=2, dropout=0.0, stops_at=11)
    resized = life(cloud, "three", run="run", workers=3, dropout=0.0)

    assert (begun(cloud, "two"), begun(cloud, "three")) == (3, 9)
    first = seen(cloud, "four", 0, range(1, 4)) + seen(cloud, "two", 0, range(4, 9))
    second = seen(cloud, "two", 1, range(9, 10)) + seen(cloud, "three", 1, range(10, 17))
    once = Counter(str(place) for place in range(SAMPLES))
    assert (first, second) == (once, once)
    for mine, theirs in zip(resized, undisturbed, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_the_story_says_why_each_was_saved(cloud: Cloud) -> None:
    life(cloud, "told", every=[5, "epoch"])
    whys = ["5 steps since the last save", "an epoch has ended"] * 2
    assert [one.why for one in cloud.view("told").checkpoints] == whys
    lines = [line for line in read_story(open_store(cloud.url("told"))) if "committed" in line]
    assert all(why in line for why, line in zip(whys, lines, strict=True))
    assert spotfit.attach(cloud.url("told")).status().saved_why == whys[-1]


def test_a_flipped_bit_costs_one_checkpoint_and_nothing_else(cloud: Cloud) -> None:
    undisturbed = life(cloud, "calm")
    life(cloud, "stopped", run="run", stops_at=11)
    newest = cloud.view("run").checkpoints[-1].name
    chunk = next(Path(cloud.storage, "run", newest, "chunks").iterdir())
    body = bytearray(chunk.read_bytes())
    body[len(body) // 2] ^= 1
    chunk.write_bytes(body)
    again = life(cloud, "again", run="run")
    assert begun(cloud, "again") == 6
    assert again == undisturbed


def train_and_go_back(config: Config) -> list[Any]:
    """Saves three times, goes back to the last, and dies; tells what its next life begins from."""
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
    eventually((Path(config["marks"]) / "go-back").exists)
    back = ckpt.restore()
    assert back is not None
    assert (back.step, ckpt.steps) == (6, 6)
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_what_was_taken_back_is_not_gone_on_from_either(cloud: Cloud) -> None:
    """Nor what the machines keep of each other."""
    handle = cloud.submit(
        train_and_go_back, workers=2, nodes=2, name="back", kind=TorchTrainer, max_failures=1
    )
    eventually(lambda: bool(cloud.opened("back")))
    one, other = cloud.opened("back")[0].round.places
    eventually(lambda: 6 in steps_kept_for(one, by=other))
    eventually(lambda: 6 in steps_kept_for(other, by=one))
    cloud.leave("go-back")
    assert handle.result(120).return_value == [6, "bucket"]


def keep_alone(config: Config) -> None:
    """Only one rank does what all have to, as for a file of torch.save."""
    alone = spotfit.get_context().get_world_rank() == 0
    if alone or config["from"] != "Checkpointer":
        ckpt = Checkpointer(model=nn.Linear(4, 1))
        if alone and config["from"] == "Checkpointer.save":
            ckpt.save()
        elif alone:
            ckpt.restore()


@pytest.mark.parametrize("what", ["Checkpointer", "Checkpointer.restore", "Checkpointer.save"])
def test_ranks_that_do_not_come_to_a_checkpointer_are_named(cloud: Cloud, what: str) -> None:
    with pytest.raises(
        spotfit.WorkerGroupError, match=f"{what} on rank 0 can never be complete: rank 1 returned"
    ):
        cloud.fit(
            keep_alone,
            workers=2,
            name="alone",
            kind=TorchTrainer,
            max_failures=0,
            config={"from": what},
        )


def train_and_move(config: Config) -> list[Any]:
    """Saves, or begins with a counter of the second rank's given as something else."""
    torch.manual_seed(config["seed"])
    model, counter = nn.Linear(4, 1), torch.optim.lr_scheduler.StepLR(_sgd(), 1)
    moved = config["moves"] and spotfit.get_context().get_world_rank() == 1
    how: Config = {"extra" if moved else "own": {"counter": counter}}
    ckpt = Checkpointer(model=prepare_model(model), **how)
    before = [weight.tolist() for weight in model.parameters()]
    try:
        ckpt.restore()
    except ConfigError as refused:
        met = torch.ones(1)
        torch.distributed.all_reduce(met)
        unchanged = before == [weight.tolist() for weight in model.parameters()]
        return [refused.what, int(met), unchanged]
    ckpt.save()
    return []


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


def test_what_does_not_fit_one_rank_is_refused_by_all_and_changes_nothing(cloud: Cloud) -> None:
    def life(seed: int, *, moves: bool) -> Any:
        config = {"seed": seed, "moves": moves}
        how: Config = {"workers": 2, "name": "moved", "kind": TorchTrainer, "config": config}
        return cloud.fit(train_and_move, **how).return_value

    life(0, moves=False)
    told = life(1, moves=True)
    assert told[1:] == [2, True]
    assert "'counter' was kept in own={…}, not extra={…}" in told[0]


def train_a_stream(config: Config) -> None:
    """Each rank's own place in it cannot be gone on with by another number of ranks."""
    place = torch.optim.lr_scheduler.StepLR(_sgd(), 1)
    Checkpointer(model=nn.Linear(4, 1), own={"place": place}).restore()


def test_an_elastic_group_is_refused_what_ties_it_to_its_size_and_spends_no_try_on_it(
    cloud: Cloud,
) -> None:
    handle = cloud.submit(
        train_a_stream, workers=(1, 2), nodes=2, kind=TorchTrainer, max_failures=-1
    )
    with pytest.raises(spotfit.WorkerGroupError, match="lets the group shrink and grow"):
        handle.result(120)
    assert any(failure.final for failure in cloud.closed()[-1].failures)


GUIDE = Path(__file__).parents[2] / "docs/guides/checkpointer.md"


def follow_the_weights(config: Config) -> dict[str, list[float]]:
    """So many steps, after each of which all weights are its number; their average then."""
    code: Config = {}
    exec(config["example"], code)  # noqa: S102 - as a reader of the guide would copy it
    several = spotfit.get_context().get_world_size() > 1
    blank = nn.Linear(4, 6)
    for weight in blank.parameters():
        nn.init.zeros_(weight)
    model = prepare_model(blank, parallel_strategy=config["strategy"] if several else None)
    average = code["Average"](model)
    ckpt = code["keep"](model, torch.optim.SGD(model.parameters()), average)
    ckpt.restore()
    while ckpt.steps < config["until"]:
        for weight in model.parameters():
            nn.init.constant_(weight, ckpt.steps + 1)
        average.follow(model)
        ckpt.step()
    ckpt.save()
    whole = {name: getattr(one, "full_tensor", one.clone)() for name, one in average.shadow.items()}
    return {name: one.flatten().tolist() for name, one in whole.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_guide_s_average_goes_on_at_every_size_of_the_group(
    cloud: Cloud, strategy: str
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "class Average" in block]
    averages = {0: 0.0}
    for step in range(1, 7):
        averages[step] = averages[step - 1] + 0.01 * (step - averages[step - 1])
    for workers, until in ((2, 2), (1, 4), (2, 6)):
        config = {"example": example, "strategy": strategy, "until": until}
        how: Config = {"workers": workers, "kind": TorchTrainer, "config": config}
        found = cloud.fit(follow_the_weights, **how).return_value
        assert found.keys() == {"weight", "bias"}
        for numbers in found.values():
            assert numbers == pytest.approx([averages[until]] * len(numbers), rel=1e-4)


class Slow:
    """Takes its time to say what is to be kept of it."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self._takes_s)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def train_until_noticed(config: Config) -> int:
    """Saves step 1, and each one after a notice, rank 1 a little later than rank 0; tells
    what its next life begins from."""
    rank = spotfit.get_context().get_world_rank()
    model = nn.Linear(4, 1)
    ckpt = Checkpointer(model=model, every=1000, own={"slow": Slow(rank)})
    restored = ckpt.restore()
    if restored is not None:
        return restored.step
    ckpt.step()
    ckpt.save()
    Path(config["marks"], f"saved by {rank}").touch()
    while spotfit.get_preemption_info() is None:
        time.sleep(0.05)
    while True:  # until the group changes over
        ckpt.step()
        time.sleep(0.2)
        ckpt.save()


def test_a_save_is_waited_for_on_the_machine_that_leaves_though_reports_are_not(
    cloud: Cloud,
) -> None:
    """And one that lacks a part is never committed, least of all in the place of a whole one."""
    handle = cloud.submit(
        train_until_noticed,
        workers=2,
        nodes=2,
        kind=TorchTrainer,
        failure_config=spotfit.FailureConfig(relax_collectives_on_preemption=True),
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=1),
    )
    cloud.sees("saved by 0")
    cloud.sees("saved by 1")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=60.0)
    assert handle.result(120).return_value > 1
    committed = [event for event in cloud.events() if isinstance(event, CheckpointCommitted)]
    assert {one.ranks for one in committed} == {(0, 1)}
