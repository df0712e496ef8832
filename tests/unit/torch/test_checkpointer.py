"""Checkpointer in one process: what it restores is what it saved, to the bit and the sample."""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import spotfit.torch
from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.saved import InMemory, Opened, Order, Saved, read_alone
from spotfit.checkpoint.segment import Segment
from spotfit.core.errors import ConfigError, IntegrityError, SessionMisuseError
from spotfit.frameworks.torch.fitting import Fit
from spotfit.frameworks.torch.launched import LaunchedGroup
from spotfit.frameworks.torch.position import Position
from spotfit.frameworks.torch.state import kept
from spotfit.model.ranks import Ranks
from spotfit.policy.failure import ends_the_same_way
from spotfit.testing.clock import ManualClock
from spotfit.torch import Checkpointer, checkpointer, export_checkpoint, init_module
from spotfit.worker import current, recall
from spotfit.worker.handover import IN_MEMORY
from spotfit.worker.local import LocalSession
from spotfit.worker.local_snapshots import LocalSnapshots


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([float(place), float(place * place)])


class Average:
    """A state that begins late, of an object of the user's."""

    def __init__(self) -> None:
        self.shadow: torch.Tensor | None = None

    def follow(self, model: nn.Module) -> None:
        weight = next(model.parameters()).detach()
        self.shadow = weight.clone() if self.shadow is None else self.shadow.lerp(weight, 0.1)

    def state_dict(self) -> dict[Any, Any]:
        return {"shadow": self.shadow, 7: "a key that is a number"}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[7] == "a key that is a number"
        self.shadow = state["shadow"]


class Life:
    """One life of a training; the next one begins blank."""

    def __init__(self, **how: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.average = Average()
        self.loader: DataLoader[Any] = DataLoader(Squares(), batch_size=4, shuffle=True)
        self.ckpt = Checkpointer(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            extra={"average": self.average},
            **{"every": 4, **how},
        )
        self.seen: list[float] = []

    def train(self, steps: int) -> list[float]:
        """So many steps; the weights then."""
        while True:
            for batch in self.loader:
                self.seen += batch[:, 0].tolist()
                self.optimizer.zero_grad()
                self.model(batch / 24).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                self.average.follow(self.model)
                self.ckpt.step({"loss": 1.0})
                if self.ckpt.steps == steps:
                    return self.everything()

    def end(self) -> None:
        """Its process is no more, and its Checkpointer with it."""
        del self.ckpt

    @property
    def newest_segment(self) -> Path:
        used = [slot for slot in self.ckpt._slots if slot.report is not None]
        return max(used, key=lambda slot: slot.report or 0).arena.path

    def everything(self) -> list[float]:
        assert self.average.shadow is not None
        tensors = [*self.model.parameters(), self.average.shadow]
        learned = [tensor.flatten() for tensor in tensors]
        return [*torch.cat(learned).tolist(), self.optimizer.param_groups[0]["lr"]]


@pytest.fixture
def one_life() -> Iterator[LocalSession]:
    session = LocalSession("run")
    current.enter(session)
    yield session
    current.leave()
    shutil.rmtree(session.snapshots.folders[0].parent, ignore_errors=True)  # a save may go on


@pytest.fixture
def session(one_life: LocalSession, monkeypatch: pytest.MonkeyPatch) -> LocalSession:
    """All lives of a training in one process: each of them may have a Checkpointer."""
    monkeypatch.setattr(checkpointer, "_refuse_second", lambda _: None)
    return one_life


class Replay:
    """What an agent has seen, which is no other rank's."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.zeros(10**5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody restores it")


def test_what_a_save_is_said_to_take_includes_what_is_each_ranks_own(session: LocalSession) -> None:
    life = Life(own={"replay": Replay()})
    life.train(5)
    assert life.ckpt._pace.measured.size_bytes > 4 * 10**5


@pytest.mark.parametrize("waits_s", [0.002, 0.2])
def test_only_waits_that_anybody_would_notice_are_told(
    session: LocalSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waits_s: float,
) -> None:
    life = Life(every=1)
    life.ckpt._clock = clock = ManualClock()  # type: ignore[assignment]  # nothing sleeps here
    monkeypatch.setattr(session.snapshots, "fate", lambda _: "given")
    monkeypatch.setattr(session.snapshots, "wait", lambda _: clock.wait(waits_s))
    life.train(3)
    assert ("checkpoint.waited" in capsys.readouterr().err) == (waits_s > 0.1)


@pytest.mark.parametrize("steps", [4, 8, 12])
def test_what_goes_on_ends_as_what_went_through(session: LocalSession, steps: int) -> None:
    """Killed within an epoch of six steps, in the next one, and right after one."""
    undisturbed = Life(every=100)
    end = undisturbed.train(15)
    undisturbed.end()
    first = Life(every=steps)
    first.train(steps + 1)
    first.end()
    second = Life()
    restored = second.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.epoch) == (steps, (steps - 1) // 6)
    assert second.train(15) == end
    assert first.seen[: steps * 4] + second.seen == undisturbed.seen


def test_without_a_checkpoint_it_begins(session: LocalSession) -> None:
    life = Life()
    assert life.ckpt.restore() is None
    life.train(1)
    shutil.os.makedirs(session.snapshots.folders[0], exist_ok=True)  # type: ignore[attr-defined]


def test_metrics_come_with_the_checkpoint(session: LocalSession) -> None:
    Life().train(4)
    assert session.metrics == {"loss": 1.0}
    assert session.checkpoint() is not None


def test_a_model_becomes_a_file(session: LocalSession, tmp_path: Path) -> None:
    life = Life(every=3)
    life.train(3)
    checkpoint = session.checkpoint()
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "m.pt")
    weights = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(weights[name], one) for name, one in life.model.state_dict().items())
    again = Checkpoint(checkpoint.path)
    export_checkpoint(again, tmp_path / "all.pt", everything=True)
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything.keys() == {"model", "optimizer", "scheduler", "average"}
    with pytest.raises(ConfigError, match="what kind"):
        export_checkpoint(again, tmp_path / "m.onnx")


def test_weights_are_not_drawn_where_a_checkpoint_brings_them(session: LocalSession) -> None:
    first = Life(every=4)
    end = first.train(15)
    first.end()
    with init_module():
        second = Life()
    assert all(weight.isnan().any() for weight in second.model.parameters())
    for forgetful in (second.ckpt.step, second.ckpt.save):
        with pytest.raises(SessionMisuseError, match="restore"):
            forgetful()
    assert second.ckpt.restore() is not None
    assert second.train(15) == end


def test_a_checkpoint_that_vanished_since_the_weights_were_left_to_it_is_told(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    Life(every=4).train(4)
    with init_module():
        second = Life()
    session.snapshots._last = None
    with pytest.raises(IntegrityError, match="cannot be found any more"):
        second.ckpt.restore()


def test_one_can_be_asked_for(session: LocalSession) -> None:
    life = Life(every="at_notice")
    life.train(3)
    assert session.checkpoint() is None
    life.ckpt.save({"by": "hand"})
    assert session.metrics == {"by": "hand"}


class Stream:
    """A place of this rank's alone."""

    def __init__(self) -> None:
        self.place = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "name": "mine"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["name"] == "mine"
        self.place = state["place"]


def test_what_is_each_ranks_own_comes_back_to_it(session: LocalSession) -> None:
    stream = Stream()
    first = Life(own={"stream": stream})
    stream.place += 7
    first.train(4)
    first.end()
    again = Stream()
    assert Life(own={"stream": again}).ckpt.restore() is not None
    assert again.place == 7


def test_what_is_each_ranks_own_ties_it_to_the_number_of_workers(session: LocalSession) -> None:
    Life(own={"stream": Stream()}).train(4)
    second = Life(own={"stream": Stream()})
    second.ckpt._world_size = 2
    with pytest.raises(ConfigError, match="stream was kept by 1 ranks, each its own, and 2 are"):
        second.ckpt.restore()


class Kept(DataLoader[Any]):
    """Keeps its own place."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"own": {"stream": Stream()}}, r"own=.* \(stream\) is each rank's own"),
        ({"loader": Kept(Squares())}, "the place of loader= is each rank's own"),
    ],
)
def test_what_ties_it_to_the_number_of_workers_is_refused_where_that_may_change(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], told: str
) -> None:
    Checkpointer(model=nn.Linear(1, 1), **given)
    monkeypatch.setattr(LocalSnapshots, "resizes", property(lambda _: True))
    with pytest.raises(ConfigError, match=told) as refused:
        Checkpointer(model=nn.Linear(1, 1), **given)
    assert ends_the_same_way(refused.value)
    Checkpointer(model=nn.Linear(1, 1), loader=DataLoader(Squares()), extra={"all": Stream()})


def test_a_restore_that_is_refused_once_is_refused_in_every_try(session: LocalSession) -> None:
    Life().train(4)
    with pytest.raises(ConfigError, match="another training") as refused:
        Checkpointer(model=nn.Linear(3, 3)).restore()
    assert ends_the_same_way(refused.value)


def test_while_gradients_are_added_up_nothing_is_saved(session: LocalSession) -> None:
    life = Life(every=2)
    for _ in range(3):
        life.ckpt.step(accumulating=True)
    assert session.checkpoint() is None
    life.train(4)
    life.end()
    restored = Life().ckpt.restore()
    assert restored is not None
    assert restored.step == 4


def test_a_save_that_is_asked_for_while_gradients_wait_says_that_they_are_lost(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = Checkpointer(model=nn.Linear(1, 1), every="at_notice")
    for accumulating in (True, False):
        ckpt.step(accumulating=accumulating)
        ckpt.save()
        assert ("checkpoint.gradients_wait" in capsys.readouterr().err) == accumulating
    ckpt.step(accumulating=True)
    assert ckpt.restore() is not None
    ckpt.save()
    assert "checkpoint.gradients_wait" not in capsys.readouterr().err


def test_an_epoch_that_ends_while_gradients_are_added_up_is_saved_with_the_next_step(
    session: LocalSession,
) -> None:
    life = Life(every="epoch")
    for epoch in range(2):
        for n, _ in enumerate(life.loader):
            life.ckpt.step(accumulating=n % 4 != 3)
        assert (session.checkpoint() is not None) == (epoch == 1)


def test_epochs_that_end_before_their_last_batch_are_told_of_once(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(every="epoch")
    for _ in range(2):
        for _ in life.loader:
            life.ckpt.step()
        list(life.loader)  # somebody only looks
        next(iter(life.loader))
    assert "WARNING" not in capsys.readouterr().err
    for _ in range(3):
        for n, _ in enumerate(life.loader):
            if n == 4:
                break
            life.ckpt.step()
    told = capsys.readouterr().err
    assert told.count("checkpoint.no_epoch_end") == 1
    assert "of the 6 batches of an epoch 5 were read and 4 told to step()" in told


def test_who_goes_back_within_an_epoch_has_not_ended_it(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(every=[4, "epoch"])
    for _ in range(2):
        for _ in life.loader:
            life.ckpt.step()
            if life.ckpt.steps == 5:
                assert life.ckpt.restore() is not None
                break
    assert "checkpoint.no_epoch_end" not in capsys.readouterr().err


@pytest.mark.parametrize("every", ["epoch", 5])
def test_a_loader_that_is_made_anew_each_epoch_is_told_of_once(
    session: LocalSession, capsys: pytest.CaptureFixture[str], every: Any
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Squares(), batch_size=4)

    ckpt = Checkpointer(model=nn.Linear(1, 1), loader=loader(), every=every)
    for _ in range(3):
        for _ in loader():
            ckpt.step()
    told = capsys.readouterr().err
    assert told.count("checkpoint.other_loader") == 1
    assert told.count("checkpoint.snapshot") == (1 if every == "epoch" else 3)


def test_epochs_have_to_end_on_all_ranks_at_once(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.torch.checkpointer.gathered", lambda mine: [mine, 7])
    with pytest.raises(ConfigError, match=r"here they have \[6, 7\] batches"):
        Life(every="epoch")
    assert session.checkpoint() is None


def test_metrics_that_cannot_be_told_are_refused_at_the_first_step(session: LocalSession) -> None:
    life = Life(every=100)
    with pytest.raises(ConfigError, match="loss"):
        life.ckpt.step({"loss": torch.ones(1)})


def test_a_save_of_what_cannot_be_kept_holds_no_other_rank_up(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream()
    life = Life(own={"stream": stream})
    stream.place = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="only a pickle"):
        life.ckpt.save()
    assert "checkpoint.withheld" in capsys.readouterr().err
    assert session.checkpoint() is None


def test_a_save_with_unfit_metrics_holds_no_other_rank_up(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(every=100)
    with pytest.raises(ConfigError, match="loss"):
        life.ckpt.save({"loss": torch.ones(1)})
    assert "checkpoint.withheld" in capsys.readouterr().err
    assert session.checkpoint() is None


def test_steps_that_went_wrong_are_taken_back_to_the_latest_checkpoint(
    session: LocalSession, remembered: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[set[Path]] = []
    folder = session.snapshots.folders[0]
    told = lambda: left.append({*folder.glob("*.segment")})  # noqa: E731
    monkeypatch.setattr(session.snapshots, "take_back", told)
    early = Life(every=4)
    early.train(5)
    remembered.append(early.newest_segment)
    early.end()
    before = {*folder.glob("*.segment")}
    life = Life(every=4)
    assert life.ckpt.restore() == ("", 4, 0, "memory")
    assert life.ckpt.restore() == ("", 4, 0, "memory")
    life.train(9)
    restored = life.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source, life.ckpt.steps) == (8, "bucket", 8)
    assert {*folder.glob("*.segment")} == before, "nothing newer is left to go on from"
    assert left == [before], "nor with other machines"
    life.train(13)
    again = life.ckpt.restore()
    assert again is not None
    assert again.step == 12


def test_damage_is_never_restored(session: LocalSession) -> None:
    Life().train(4)
    for chunk in session.snapshots.folders[0].parent.glob("checkpoint_*/chunks/*"):
        body = bytearray(chunk.read_bytes())
        body[0] ^= 1
        chunk.write_bytes(body)
    with pytest.raises(IntegrityError, match="can be read any more"):
        Life().ckpt.restore()


@pytest.fixture
def remembered(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Segments that are offered as the state in memory."""
    paths: list[Path] = []

    def told() -> Saved:
        return Saved([InMemory(Segment.open(path)) for path in paths], IN_MEMORY)

    reopen = session.snapshots.reopen

    def again(opened: Opened) -> Saved:
        return told() if opened.name == IN_MEMORY else reopen(opened)

    monkeypatch.setattr(session.snapshots, "open_memory", told)
    monkeypatch.setattr(session.snapshots, "reopen", again)
    return paths


def test_what_lies_in_memory_is_gone_on_from_before_any_checkpoint(
    session: LocalSession, remembered: list[Path]
) -> None:
    undisturbed = Life(every=100).train(15)
    first = Life(every=4)
    first.train(9)
    remembered.append(first.newest_segment)
    first.end()
    second = Life()
    restored = second.ckpt.restore()
    assert restored == ("", 8, 1, "memory")
    assert second.train(15) == undisturbed


def test_a_save_before_the_first_step_changes_nothing(session: LocalSession) -> None:
    """Torch shows no state of an optimizer that has none, but has it take a step for it."""
    undisturbed = Life(every=100).train(15)
    early = Life(every=100)
    early.ckpt.save()
    assert early.train(15) == undisturbed
    early.end()
    second = Life()
    assert second.ckpt.restore() is not None
    assert second.train(15) == undisturbed


@pytest.mark.parametrize("begun_from", [None, "a report of the user's own"])
def test_what_was_read_of_a_torn_state_is_taken_back_where_nothing_else_is_saved(
    session: LocalSession,
    remembered: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    begun_from: str | None,
) -> None:
    undisturbed = Life(every=100).train(15)
    first = Life(every=4)
    first.train(5)
    remembered.append(first.newest_segment)
    first.end()
    monkeypatch.setattr(type(session.snapshots), "begun_from", begun_from)
    monkeypatch.setattr(type(session.snapshots), "has_snapshots", False)
    monkeypatch.setattr(session.snapshots, "open", lambda name: None)
    monkeypatch.setattr(recall, "read_alone", torn)
    second = Life()
    assert second.ckpt.restore() is None
    assert second.train(15) == undisturbed


def torn(orders: Sequence[Order]) -> None:
    """All of it is handed over, and then there should be more."""
    read_alone(orders)
    raise IntegrityError("the other machine is gone")


def test_nothing_of_the_state_before_is_kept_once_it_is_overwritten(
    session: LocalSession, remembered: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(every=4)
    first.train(5)
    remembered.append(first.newest_segment)
    first.end()
    monkeypatch.setattr(type(session.snapshots), "has_snapshots", False)
    copies: list[weakref.ref[Any]] = []

    def noted(in_use: dict[str, Any]) -> Callable[[], None]:
        put_back = kept(in_use)
        copies.append(weakref.ref(put_back))
        return put_back

    monkeypatch.setattr("spotfit.frameworks.torch.state.kept", noted)
    second = Life()
    assert second.ckpt.restore() is not None
    gc.collect()
    assert [copy() for copy in copies] == [None]


def test_a_state_in_memory_that_is_damaged_gives_way_to_the_checkpoint(
    session: LocalSession, remembered: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Life(every=4).train(5)
    remembered.append(session.snapshots.folders[0] / "gone.segment")
    restored = Life().ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source) == (4, "bucket")
    assert "checkpoint.broken" in capsys.readouterr().err


def test_without_any_checkpoint_a_damaged_memory_is_no_reason_to_fail(
    session: LocalSession, remembered: list[Path]
) -> None:
    remembered.append(session.snapshots.folders[0] / "gone.segment")
    assert Life().ckpt.restore() is None
    shutil.os.makedirs(session.snapshots.folders[0], exist_ok=True)  # type: ignore[attr-defined]


def test_a_full_machine_costs_a_checkpoint_and_no_training(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, capacity_bytes: int, index_bytes: int = 0) -> Segment:
        raise OSError("No space left on device")

    monkeypatch.setattr(Segment, "create", full)
    Life().train(5)
    assert "checkpoint.withheld" in capsys.readouterr().err
    assert session.checkpoint() is None


def test_what_cannot_be_kept_is_refused_at_once(session: LocalSession) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(
        ConfigError, match=r"extra\['clock'\] is an object, which has no state_dict"
    ):
        Checkpointer(model=model, extra={"clock": object()})
    with pytest.raises(ConfigError, match="may not use the names model"):
        Checkpointer(model=model, extra={"model": model})
    assert session.snapshots.folders


class Best:
    """A score of the user's own, which begins late."""

    def __init__(self) -> None:
        self.score: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score = state["score"]


def test_every_save_looks_at_what_it_keeps_not_only_the_first(session: LocalSession) -> None:
    best = Best()
    ckpt = Checkpointer(model=nn.Linear(1, 1), extra={"best": best}, every="at_notice")
    ckpt.save()
    best.score = np.float64(0.5)
    ckpt.save()
    del ckpt
    again = Best()
    assert Checkpointer(model=nn.Linear(1, 1), extra={"best": again}).restore() is not None
    assert (again.score, type(again.score)) == (0.5, float)
    ckpt = Checkpointer(model=nn.Linear(1, 1), extra={"best": again}, every="at_notice")
    ckpt.save()
    again.score = object()
    with pytest.raises(ConfigError, match=r"The state of others\.best\.whole\.score holds"):
        ckpt.save()
    assert ckpt.restore() is not None


class Numbers(IterableDataset[torch.Tensor]):
    """No length, and no end that could be known before it comes."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4.0)


@pytest.mark.parametrize("every", ["epoch", ["10m", "epoch"]])
@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (None, "there is no loader"),
        (DataLoader(Numbers()), "only the loader knows"),
        (DataLoader(Squares(), batch_sampler=[[1], [2]]), "only the loader knows"),
        (
            DataLoader(Squares(), sampler=WeightedRandomSampler([1.0], 5)),
            "shuffles or not by itself or by a DistributedSampler",
        ),
    ],
)
def test_an_epoch_of_which_no_end_is_known_is_no_time_to_save(
    session: LocalSession, loader: Any, why: str, every: Any
) -> None:
    with pytest.raises(ConfigError, match=why):
        Checkpointer(model=nn.Linear(1, 1), loader=loader, every=every)
    shutil.os.makedirs(session.snapshots.folders[0], exist_ok=True)  # type: ignore[attr-defined]


def test_epochs_are_counted_where_only_the_loader_knows_its_place(session: LocalSession) -> None:
    def life(steps: int) -> tuple[int, list[int]]:
        """As the guide's loop has it: three epochs of four batches."""
        loader: DataLoader[Any] = DataLoader(Numbers())
        ckpt = Checkpointer(model=nn.Linear(1, 1), loader=loader, every=5)
        restored = ckpt.restore()
        first, epochs = restored.epoch if restored else 0, []
        for epoch in range(first, 3):
            for _ in loader:
                epochs.append(epoch)
                ckpt.step()
                if ckpt.steps == steps:
                    return first, epochs
        return first, epochs

    assert life(10) == (0, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert life(-1) == (2, [2, 2, 2, 2])


def test_another_model_is_never_gone_on_from_in_silence(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpointer(model=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))).save()
    with pytest.raises(ConfigError, match=r"model\.1\.bias, model\.1\.weight would be lost"):
        Checkpointer(model=nn.Sequential(nn.Linear(1, 1))).restore()
    halves = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).bfloat16()
    assert Checkpointer(model=halves).restore() is not None
    assert "checkpoint.cast" in capsys.readouterr().err


def test_what_was_unfrozen_is_given_to_its_optimizer_before_it_goes_on(
    session: LocalSession,
) -> None:
    def life(*, unfrozen: bool) -> Checkpointer:
        body, head = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.Adam(head.parameters())
        if unfrozen:
            optimizer.add_param_group({"params": [*body.parameters()]})
        model = nn.Sequential(body, head)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer)

    life(unfrozen=True).save()
    with pytest.raises(ConfigError, match=r"knew of 0\.bias, 0\.weight would be lost"):
        life(unfrozen=False).restore()
    assert life(unfrozen=True).restore() is not None


@pytest.mark.parametrize("stepped", [False, True])
def test_a_restore_that_is_refused_has_changed_nothing(
    session: LocalSession, stepped: bool
) -> None:
    """Whether the optimizer is given room for what would be read, or has some already."""
    Life().train(5)
    model = nn.Sequential(nn.Linear(2, 8))
    optimizer = torch.optim.Adam(model.parameters())
    if stepped:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    ckpt = Checkpointer(model=model, optimizer=optimizer, extra={"average": Average()})
    before = str((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    with pytest.raises(ConfigError, match=r"model\.2\.bias, model\.2\.weight would be lost"):
        ckpt.restore()
    assert str((model.state_dict(), optimizer.state_dict(), torch.get_rng_state())) == before
    assert ckpt.steps == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"own": {"stream": Stream()}}, "stream was kept by 1 ranks, each its own, and 2 are"),
        ({"loader": DataLoader(Squares())}, "the place of each is its own"),
    ],
)
def test_another_number_of_workers_is_refused_before_anything_is_read(
    session: LocalSession, how: Any, why: str
) -> None:
    Checkpointer(model=nn.Linear(1, 1), own={"stream": Stream()}).save()
    model = nn.Linear(1, 1)
    before = str(model.state_dict())
    ckpt = Checkpointer(model=model, **how)
    ckpt._world_size = 2
    if isinstance(ckpt._place, Position):
        ckpt._place._shared = False  # as on two
    with pytest.raises(ConfigError, match=why):
        ckpt.restore()
    assert str(model.state_dict()) == before


def test_what_one_rank_lacks_another_one_may_have(
    session: LocalSession,
) -> None:
    """Each has a part of the model, and all are asked before any of them reads."""
    Checkpointer(model=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))).save()
    first = Checkpointer(model=nn.Sequential(nn.Linear(1, 1)))
    other = Fit(frozenset(), frozenset(), frozenset())

    def gathered(mine: Any) -> list[Any]:
        return [mine, mine._replace(fit=other)] if hasattr(mine, "fit") else [mine]

    first._recall._gather = gathered
    assert first.restore() is not None


def test_who_does_not_come_is_asked_for_before_torch_waits(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would say nothing for half an hour, and then not who."""
    met: list[str] = []

    def agreed(kind: str, value: bytes) -> bytes:
        met.append(kind)
        return value

    def gathered(mine: Any) -> list[Any]:
        met.append("torch")
        return [mine]

    monkeypatch.setattr(session.snapshots, "agreed", agreed)
    monkeypatch.setattr(checkpointer, "gathered", gathered)
    monkeypatch.setattr(checkpointer, "broadcast", lambda mine: gathered(mine)[0])
    life = Life(every="epoch")
    assert met == ["Checkpointer", "torch"]
    del met[:]
    life.ckpt.restore()
    assert met == ["Checkpointer.restore", "torch"]
    del met[:]
    life.ckpt.save()
    assert met[:2] == ["Checkpointer.save", "torch"]
    life.ckpt.save()
    assert met.count("Checkpointer.save") == 1, "snapshots wait for nobody"


def test_what_is_given_for_the_first_time_or_under_another_name_begins_anew_and_is_told(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    was, now = Best(), Best()
    was.score, now.score = 0.5, 0.25
    Checkpointer(model=nn.Linear(1, 1), extra={"a": was, "b": was}, own={"c": was}).save()
    again = Best()
    how: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu"), "own": {"f": now}}
    ckpt = Checkpointer(model=nn.Linear(1, 1), extra={"b": again, "e": now}, **how)
    assert ckpt.restore() is not None
    assert (again.score, now.score) == (0.5, 0.25)
    told = capsys.readouterr().err
    assert re.search(r"checkpoint\.unused names=.*'a', 'c'\]", told)
    assert re.search(r"checkpoint\.begins_anew names=.*'e', 'f', 'scaler'\]", told)


def learning(steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    for _ in range(steps):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
    return model, optimizer


def by_steps(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def in_one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)


@pytest.mark.parametrize("make", [by_steps, in_one_cycle])
def test_a_scheduler_is_given_for_the_first_time(
    session: LocalSession,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[torch.optim.Optimizer], Any],
) -> None:
    """Torch's write options into the optimizer's groups, which were not saved."""
    model, optimizer = learning(2)
    Checkpointer(model=model, optimizer=optimizer).save()
    again, its_optimizer = learning()
    scheduler = make(its_optimizer)
    written = its_optimizer.param_groups[0]["initial_lr"]
    ckpt = Checkpointer(model=again, optimizer=its_optimizer, scheduler=scheduler)
    assert ckpt.restore() is not None
    told = capsys.readouterr().err
    assert re.search(r"checkpoint\.begins_anew names=.*'scheduler'.*optimizer's initial_lr", told)
    (group,) = its_optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.25, written)
    assert str(its_optimizer.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    its_optimizer.step()
    scheduler.step()
    assert group["lr"] != 0.25
    ckpt.save()


def test_an_optimizer_is_given_for_the_first_time(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = learning(2)
    Checkpointer(model=model).save()
    again, optimizer = learning(1)
    before = str(optimizer.state_dict())
    assert Checkpointer(model=again, optimizer=optimizer).restore() is not None
    assert str(again.state_dict()) == str(model.state_dict())
    assert str(optimizer.state_dict()) == before
    assert "checkpoint.begins_anew names=['optimizer']" in capsys.readouterr().err


def test_weights_that_are_new_in_a_group_begin_anew_and_groups_are_refused(
    session: LocalSession,
) -> None:
    def life(*, added: str = "") -> Checkpointer:
        body, head = nn.Linear(1, 1), nn.Linear(1, 1)
        learned = [*head.parameters(), *(body.parameters() if added == "weights" else ())]
        optimizer = torch.optim.Adam(learned)
        if added == "group":
            optimizer.add_param_group({"params": [*body.parameters()]})
        model = nn.Sequential(body, head)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer)

    life().save()
    with pytest.raises(ConfigError, match="more groups of weights than were saved, by 1"):
        life(added="group").restore()
    assert life(added="weights").restore() is not None


@pytest.mark.parametrize("trained", [0, 3])
def test_a_loader_that_comes_or_goes_is_told_of(
    session: LocalSession, capsys: pytest.CaptureFixture[str], trained: int
) -> None:
    loader: DataLoader[Any] = DataLoader(Squares())
    first = Checkpointer(model=nn.Linear(1, 1), loader=loader)
    for _, _batch in zip(range(trained), loader, strict=False):
        first.step()
    first.save()
    assert Checkpointer(model=nn.Linear(1, 1), loader=DataLoader(Squares())).restore() is not None
    assert "names=" not in capsys.readouterr().err
    second = Checkpointer(model=nn.Linear(1, 1))
    assert second.restore() is not None
    assert "checkpoint.unused names=['loader']" in capsys.readouterr().err
    second.save()
    assert Checkpointer(model=nn.Linear(1, 1), loader=DataLoader(Squares())).restore() is not None
    assert "checkpoint.begins_anew names=['loader']" in capsys.readouterr().err


class Failing(Best):
    """Its file is gone."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no such file")


def test_whatever_an_object_raises_nothing_has_changed(session: LocalSession) -> None:
    """The optimizer has been given room by then, of which nothing was read yet."""
    model, optimizer = learning(2)
    Checkpointer(model=model, optimizer=optimizer, extra={"best": Best()}).save()
    again, its_optimizer = learning()
    ckpt = Checkpointer(model=again, optimizer=its_optimizer, extra={"best": Failing()})
    with pytest.raises(RuntimeError, match="no such file"):
        ckpt.restore()
    assert not its_optimizer.state


def test_what_moved_from_what_all_share_to_what_is_each_ranks_own_is_refused(
    session: LocalSession,
) -> None:
    """A stream would begin anew, without a word."""
    Checkpointer(model=nn.Linear(1, 1), extra={"a": Best()}, own={"b": Best()}).save()
    with pytest.raises(ConfigError, match=r"'a' was kept in extra=\{…\}, not own=\{…\}"):
        Checkpointer(model=nn.Linear(1, 1), own={"a": Best(), "b": Best()}).restore()
    with pytest.raises(ConfigError, match=r"'b' was kept in own=\{…\}, not extra=\{…\}"):
        Checkpointer(model=nn.Linear(1, 1), extra={"a": Best(), "b": Best()}).restore()


def test_a_model_goes_on_alone_and_the_log_says_what_it_leaves(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life()
    life.train(4)
    alone = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    restored = Checkpointer(model=alone).restore()
    assert restored is not None
    assert restored.step == 4
    assert str(alone.state_dict()) == str(life.model.state_dict())
    told = capsys.readouterr().err
    assert "checkpoint.unused" in told
    assert "['average', 'loader', 'optimizer', 'scheduler']" in told


def test_a_group_that_was_empty_may_be_gone(session: LocalSession) -> None:
    def life(*groups: tuple[int, float]) -> tuple[Checkpointer, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        told = [
            {"params": [*model[at].parameters()] if at >= 0 else [], "lr": lr} for at, lr in groups
        ]
        optimizer = torch.optim.Adam(told)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer), optimizer

    life((-1, 0.5), (0, 0.25), (1, 0.125))[0].save()
    ckpt, optimizer = life((0, 0.0), (1, 0.0))
    assert ckpt.restore() is not None
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


class Strict(Best):
    """As an average of weights would, it knows their names."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("module.weight")


@pytest.mark.parametrize("kind", ["extra", "own"])
def test_an_object_that_does_not_take_its_state_back_is_told_by_name(
    session: LocalSession, kind: str
) -> None:
    how: Any = {kind: {"ema": Strict()}}
    Checkpointer(model=nn.Linear(1, 1), **how).save()
    with pytest.raises(
        ConfigError, match=r"ema \(Strict\) did not take back .*'module\.weight'"
    ) as refused:
        Checkpointer(model=nn.Linear(1, 1), **how).restore()
    assert not ends_the_same_way(refused.value), "the user's own code may meet a full disk"


@pytest.mark.parametrize(("was", "is_on"), [(False, True), (False, False), (True, False)])
def test_a_scaler_that_is_enabled_later_begins_anew(
    session: LocalSession, capsys: pytest.CaptureFixture[str], was: bool, is_on: bool
) -> None:
    def ckpt(*, enabled: bool) -> Checkpointer:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return Checkpointer(model=nn.Linear(1, 1), scaler=scaler)

    ckpt(enabled=was).save()
    assert ckpt(enabled=is_on).restore() is not None
    told = capsys.readouterr().err
    assert ("checkpoint.begins_anew" in told) == (is_on and not was)


@pytest.mark.parametrize("kind", ["extra", "own"])
def test_what_cannot_be_kept_shows_at_the_first_step(session: LocalSession, kind: str) -> None:
    best = Best()
    best.score = object()
    how: Any = {kind: {"best": best}}
    ckpt = Checkpointer(model=nn.Linear(1, 1), every=100, **how)
    with pytest.raises(ConfigError, match=r"best\.(whole\.)?score holds objects that only"):
        ckpt.step()


def test_what_cannot_be_kept_is_looked_for_once(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def state_dict() -> dict[str, Any]:
        looks.append("look")
        return {}

    best = Best()
    monkeypatch.setattr(best, "state_dict", state_dict)
    ckpt = Checkpointer(model=nn.Linear(1, 1), every=100, own={"best": best})
    for _ in range(5):
        ckpt.step()
    assert looks == ["look"]


def test_a_module_s_own_tensor_may_have_grown(session: LocalSession) -> None:
    class Scaled(nn.Linear):
        def __init__(self, history: int) -> None:
            super().__init__(1, 1)
            self.history = torch.arange(history)

        def get_extra_state(self) -> Any:
            return self.history

        def set_extra_state(self, state: Any) -> None:
            self.history = state

    Checkpointer(model=Scaled(5)).save()
    model = Scaled(1)
    assert Checkpointer(model=model).restore() is not None
    assert model.history.tolist() == [0, 1, 2, 3, 4]


def test_a_loop_that_fetches_ahead_over_an_epoch_s_end_is_told(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def ahead(loader: Iterable[Any]) -> Iterator[Any]:
        batches = (batch for _ in range(2) for batch in loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held

    life = Life(every="epoch")
    for _ in ahead(life.loader):
        life.ckpt.step()
    told = capsys.readouterr().err
    assert "6 were read and 5 told to step() when the next epoch began" in told
    assert "fetch none of the next epoch before the last one is told" in told


def test_what_was_kept_and_nobody_asks_for_is_told_of(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpointer(
        model=nn.Linear(1, 1), extra={"best": Best(), "ema": Best()}, own={"stream": Best()}
    ).save()
    assert Checkpointer(model=nn.Linear(1, 1), extra={"best": Best()}).restore() is not None
    told = capsys.readouterr().err
    assert "checkpoint.unused" in told
    assert "['ema', 'stream']" in told
    model, extra = nn.Linear(1, 1), {"best": Best(), "ema": Best()}
    assert Checkpointer(model=model, extra=extra, own={"stream": Best()}).restore() is not None
    assert "checkpoint.unused" not in capsys.readouterr().err


def test_what_is_saved_after_an_epoch_s_last_word_does_not_say_it_again(
    session: LocalSession,
) -> None:
    def life(ends: int) -> list[float]:
        """A rate that is halved after each of three epochs, and then saved."""
        life = Life(every="at_notice")
        life.end()
        rates = torch.optim.lr_scheduler.StepLR(life.optimizer, 1, 0.5)
        ckpt = Checkpointer(
            model=life.model, optimizer=life.optimizer, scheduler=rates, loader=life.loader
        )
        restored = ckpt.restore()
        told = []
        for epoch in range(restored.epoch if restored else 0, 3):
            for batch in life.loader:
                told.append(float(rates.get_last_lr()[0]))
                life.model(batch / 24).sum().backward()
                life.optimizer.step()
                ckpt.step()
            rates.step()
            ckpt.save()
            if epoch == ends:
                break
        return told

    assert life(0) + life(2) == [0.05] * 6 + [0.025] * 6 + [0.0125] * 6


def test_a_second_one_is_refused_and_after_the_first_too(one_life: LocalSession) -> None:
    """Each would restore what the other one saved last."""
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    ckpt = Checkpointer(model=student)
    with pytest.raises(ConfigError, match="has a Checkpointer already"):
        Checkpointer(model=teacher)
    ckpt.save()
    del ckpt
    with pytest.raises(ConfigError, match="runs of their own"):
        Checkpointer(model=teacher)


def test_several_models_are_one(session: LocalSession) -> None:
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    both = Checkpointer(model=nn.ModuleDict({"student": student, "teacher": teacher}))
    both.save()
    assert both.restore() is not None


def test_one_that_could_not_be_made_is_none(one_life: LocalSession) -> None:
    with pytest.raises(ConfigError):
        Checkpointer(model=nn.Linear(1, 1), every="often")
    assert Checkpointer(model=nn.Linear(1, 1)).restore() is None


def test_a_pass_that_was_left_by_break_goes_on_where_it_was_left(session: LocalSession) -> None:
    """Nobody knows whether that was meant as the epoch's end, or as the end of this life."""
    first = Life(every="at_notice")
    for n, batch in enumerate(first.loader):
        first.seen += batch[:, 0].tolist()
        first.ckpt.step()
        if n == 2:
            break
    first.ckpt.save()
    first.end()
    second = Life()
    assert second.ckpt.restore() == ("checkpoint_000000", 3, 0, "bucket")
    rest = [place for batch in second.loader for place in batch[:, 0].tolist()]
    assert sorted(first.seen + rest) == list(range(24))


def test_workers_that_do_not_know_each_other_are_told() -> None:
    current.enter(LocalSession("run", LaunchedGroup(Ranks(world_rank=1, world_size=2))))
    try:
        with pytest.raises(ConfigError, match="process group of all 2 workers"):
            Checkpointer(model=nn.Linear(1, 1))
    finally:
        current.leave()


def test_outside_of_a_training_there_is_none() -> None:
    with pytest.raises(SessionMisuseError):
        spotfit.torch.Checkpointer(model=nn.Linear(1, 1))
