"""Checkpointer in one process: a restored training continues bit by bit."""

from __future__ import annotations

import gc
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import spotfit.torch
from spotfit.checkpoint import base_checkpointer, restore_candidates
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import CheckpointReport
from spotfit.checkpoint.reader import (
    ChunkRead,
    MemoryShardReader,
    SavedState,
    SavedStateDescriptor,
    read_chunks,
)
from spotfit.checkpoint.shm_arena import ShmArena
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import IN_MEMORY_NAME, GroupOutlook, run_save_at_end
from spotfit.core.errors import ConfigError, IntegrityError, SessionMisuseError
from spotfit.frameworks.torch.torchrun_group import LauncherGroup
from spotfit.model.reporting import CheckpointUploadMode, SaveAtEnd
from spotfit.model.topology import Ranks
from spotfit.policy.retry_budget import is_permanent_error
from spotfit.testing.builders import ManualClock
from spotfit.torch import Checkpointer, export_checkpoint, init_module
from spotfit.torch.checkpoint import checkpointer, training_state
from spotfit.torch.checkpoint.compatibility import StateCompatibility
from spotfit.torch.checkpoint.data_position import SamplerPosition
from spotfit.torch.checkpoint.training_state import backup_tensors
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([float(place), float(place * place)])


class Average:
    """A user-defined object that creates its tensor at the first update."""

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


class TrainingProcess:
    """One process of a training; a new object represents the process after a restart."""

    def __init__(self, **options: Any) -> None:
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
            **{"every": 4, "extra": {"average": self.average}, **options},
        )
        self.samples: list[float] = []

    def train(self, steps: int) -> list[float]:
        """Train up to this step and return the weights."""
        while True:
            for batch in self.loader:
                self.samples += batch[:, 0].tolist()
                self.optimizer.zero_grad()
                self.model(batch / 24).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                self.average.follow(self.model)
                self.ckpt.step({"loss": 1.0})
                if self.ckpt.steps == steps:
                    return self.everything()

    def end(self) -> None:
        """End the process: its Checkpointer is released."""
        del self.ckpt

    @property
    def newest_segment(self) -> Path:
        used = [slot for slot in self.ckpt._slots if slot.report_index is not None]
        return max(used, key=lambda slot: slot.report_index or 0).arena.path

    def everything(self) -> list[float]:
        assert self.average.shadow is not None
        tensors = [*self.model.parameters(), self.average.shadow]
        weights = [tensor.flatten() for tensor in tensors]
        return [*torch.cat(weights).tolist(), self.optimizer.param_groups[0]["lr"]]


@pytest.fixture
def single_session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()
    shutil.rmtree(
        session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True
    )  # a save may be in progress


@pytest.fixture
def session(single_session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> LocalSession:
    """A session in which each simulated process may create a Checkpointer."""
    monkeypatch.setattr(base_checkpointer, "_reject_second_checkpointer", lambda _: None)
    return single_session


class Replay:
    """A replay buffer, which belongs to one rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.zeros(10**5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it must not be restored")


def test_the_size_of_a_save_includes_per_rank_state(session: LocalSession) -> None:
    process = TrainingProcess(per_rank={"replay": Replay()})
    process.train(5)
    assert process.ckpt._save_scheduler.cost_tracker.size_bytes > 4 * 10**5


@pytest.mark.parametrize("waits_s", [0.002, 0.2])
def test_only_long_waits_are_logged(
    session: LocalSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waits_s: float,
) -> None:
    process = TrainingProcess(every=1)
    process.ckpt._clock = clock = ManualClock()  # type: ignore[assignment]  # nothing sleeps here
    monkeypatch.setattr(session.snapshot_channel, "status_of", lambda _: "submitted")
    monkeypatch.setattr(session.snapshot_channel, "wait_for_upload", lambda _: clock.wait(waits_s))
    process.train(3)
    assert ("checkpoint.save_blocked" in capsys.readouterr().err) == (waits_s > 0.1)


@pytest.mark.parametrize("steps", [4, 8, 12])
def test_a_resumed_training_ends_like_an_undisturbed_one(session: LocalSession, steps: int) -> None:
    """Restart within an epoch of six steps, in the next epoch, and after its end."""
    undisturbed = TrainingProcess(every=100)
    end = undisturbed.train(15)
    undisturbed.end()
    first = TrainingProcess(every=steps)
    first.train(steps + 1)
    first.end()
    second = TrainingProcess()
    restored = second.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.epoch) == (steps, (steps - 1) // 6)
    assert second.train(15) == end
    assert first.samples[: steps * 4] + second.samples == undisturbed.samples


def test_without_a_checkpoint_restore_returns_none(session: LocalSession) -> None:
    process = TrainingProcess()
    assert process.ckpt.restore() is None
    process.train(1)
    shutil.os.makedirs(session.snapshot_channel.segment_dirs[0], exist_ok=True)  # type: ignore[attr-defined]


def test_training_without_restore_in_a_run_with_checkpoints_is_warned_once(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    first = TrainingProcess()
    first.train(5)
    first.end()
    assert "not_restored" not in capsys.readouterr().err
    TrainingProcess().train(3)
    assert capsys.readouterr().err.count("Checkpointer.restore() was not called") == 1
    restored = TrainingProcess()
    restored.ckpt.restore()
    restored.train(6)
    assert "not_restored" not in capsys.readouterr().err


def test_metrics_are_stored_with_the_checkpoint(session: LocalSession) -> None:
    TrainingProcess().train(4)
    assert session.metrics == {"loss": 1.0}
    assert session.latest_checkpoint() is not None


def test_a_checkpoint_is_exported_to_a_file(session: LocalSession, tmp_path: Path) -> None:
    process = TrainingProcess(every=3)
    process.train(3)
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "m.pt")
    weights = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(weights[name], one) for name, one in process.model.state_dict().items())
    again = Checkpoint(checkpoint.path)
    export_checkpoint(again, tmp_path / "all.pt", everything=True)
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything.keys() == {"model", "optimizer", "scheduler", "average"}
    with pytest.raises(ConfigError, match="needs the model"):
        export_checkpoint(again, tmp_path / "m.onnx")


def test_weights_are_not_initialized_if_a_checkpoint_exists(session: LocalSession) -> None:
    first = TrainingProcess(every=4)
    end = first.train(15)
    first.end()
    with init_module():
        second = TrainingProcess()
    assert all(weight.isnan().any() for weight in second.model.parameters())
    for call in (second.ckpt.step, second.ckpt.save):
        with pytest.raises(SessionMisuseError, match="restore"):
            call()
    assert second.ckpt.restore() is not None
    assert second.train(15) == end


def test_a_checkpoint_that_is_missing_after_deferred_init_is_an_error(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrainingProcess(every=4).train(4)
    with init_module():
        second = TrainingProcess()
    session.snapshot_channel._latest_name = None
    with pytest.raises(IntegrityError, match="is missing in restore"):
        second.ckpt.restore()


def test_save_saves_at_once(session: LocalSession) -> None:
    process = TrainingProcess(every="at_notice")
    process.train(3)
    assert session.latest_checkpoint() is None
    process.ckpt.save({"by": "hand"})
    assert session.metrics == {"by": "hand"}


@pytest.mark.parametrize(
    ("total_steps", "progress"), [(None, []), (4, [0.25, 0.5, 0.75]), (2, [0.5, 1.0, 1.0])]
)
def test_each_save_records_the_share_of_all_steps(
    session: LocalSession,
    monkeypatch: pytest.MonkeyPatch,
    total_steps: int | None,
    progress: list[float],
) -> None:
    recorded: list[float] = []
    monkeypatch.setattr(session.snapshot_channel, "record_progress", recorded.append)
    TrainingProcess(every=1, total_steps=total_steps).train(3)
    assert recorded == progress


@pytest.mark.parametrize("total_steps", [0, -1, 1.5, True, "100"])
def test_an_invalid_number_of_steps_is_rejected(session: LocalSession, total_steps: Any) -> None:
    with pytest.raises(ConfigError, match="total_steps must be an integer"):
        TrainingProcess(total_steps=total_steps)


def end_of(session: LocalSession) -> SaveAtEnd:
    end = run_save_at_end(session.snapshot_channel)
    assert end is not None
    return end


def test_the_steps_since_the_last_save_are_saved_at_the_end(session: LocalSession) -> None:
    process = TrainingProcess(every=4)
    weights = process.train(6)
    session.metrics = {"reported": True}
    end = end_of(session)
    assert (end.step, end.saved_step, end.has_snapshot, end.error) == (6, 4, True, "")
    second = TrainingProcess()
    restored = second.ckpt.restore()
    assert restored is not None
    assert (restored.step, second.everything()) == (6, weights)
    assert session.metrics == {"reported": True}, "the snapshot is no report"


def test_the_checkpointer_is_released_after_the_save_at_the_end(session: LocalSession) -> None:
    process = TrainingProcess(every=4)
    process.train(5)
    ended = weakref.ref(process.ckpt)
    process.end()
    gc.collect()
    assert ended() is not None
    end_of(session)
    gc.collect()
    assert ended() is None


def test_without_save_at_end_nothing_is_saved_at_the_end(session: LocalSession) -> None:
    TrainingProcess(every=4, save_at_end=False).train(6)
    assert run_save_at_end(session.snapshot_channel) is None


def test_saved_steps_are_not_saved_again_at_the_end(session: LocalSession) -> None:
    TrainingProcess(every=4).train(4)
    saved = session.latest_checkpoint()
    end = end_of(session)
    assert (end.step, end.saved_step, end.has_snapshot) == (4, 4, False)
    assert session.latest_checkpoint() is saved


def files_in(folder: Path) -> CheckpointReport:
    return CheckpointReport(
        Checkpoint.from_directory(folder), CheckpointUploadMode.SYNC, delete_after_upload=False
    )


def test_files_reported_after_the_last_step_are_the_final_checkpoint(
    session: LocalSession, tmp_path: Path
) -> None:
    process = TrainingProcess(every=4)
    process.train(5)
    session.report_checkpoint({}, files_in(tmp_path))
    end = end_of(session)
    assert (end.has_newer_files, end.has_snapshot) == (True, False)


def test_steps_after_reported_files_are_saved_at_the_end(
    session: LocalSession, tmp_path: Path
) -> None:
    process = TrainingProcess(every=4)
    process.train(5)
    session.report_checkpoint({}, files_in(tmp_path))
    process.train(6)
    end = end_of(session)
    assert (end.has_newer_files, end.has_snapshot) == (False, True)


class FailingAtEnd:
    """An object whose state cannot be read once `is_failing` is set."""

    is_failing = False
    error_text = "the device is gone"

    def state_dict(self) -> dict[str, Any]:
        if self.is_failing:
            raise RuntimeError(self.error_text)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_an_error_of_the_save_at_the_end_is_returned(session: LocalSession) -> None:
    failing = FailingAtEnd()
    process = TrainingProcess(every=4, per_rank={"failing": failing})
    process.train(5)
    failing.is_failing = True
    end = end_of(session)
    assert not end.has_snapshot
    assert end.error == "RuntimeError('the device is gone')"


def test_a_long_error_of_the_save_at_the_end_is_shortened(session: LocalSession) -> None:
    failing = FailingAtEnd()
    process = TrainingProcess(every=4, per_rank={"failing": failing})
    process.train(5)
    failing.is_failing, failing.error_text = True, "x" * 10_000
    end = end_of(session)
    assert msgspec.json.decode(msgspec.json.encode(end), type=SaveAtEnd) == end


def test_a_model_that_was_converted_after_the_last_step_is_not_saved(
    session: LocalSession,
) -> None:
    process = TrainingProcess(every=4)
    process.train(5)
    process.model.half()
    end = end_of(session)
    assert not end.has_snapshot
    assert "another shape or dtype than at the last step" in end.error


@pytest.mark.parametrize("changes", [True, False])
def test_weights_that_are_changed_after_the_last_step_have_another_digest(
    session: LocalSession, changes: bool
) -> None:
    digests = []
    for is_changed in (False, changes):
        process = TrainingProcess(every=4)
        process.train(5)
        process.model.eval()
        if is_changed:
            with torch.no_grad():
                next(process.model.parameters()).zero_()
        digests.append(end_of(session).state_digest)
    assert digests[0]
    assert (digests[0] != digests[1]) == changes


class Synchronized:
    """An object whose state_dict gathers from all ranks after the training."""

    is_gathering = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_gathering:
            torch.distributed.all_reduce(torch.ones(1))
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_collective_of_the_save_at_the_end_is_rejected(
    session: LocalSession, tmp_path: Path
) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        synchronized = Synchronized()
        process = TrainingProcess(every=4, per_rank={"synchronized": synchronized})
        process.train(5)
        synchronized.is_gathering = True
        end = end_of(session)
    finally:
        torch.distributed.destroy_process_group()
    assert not end.has_snapshot
    assert "can only be read by all ranks together" in end.error


class Stream:
    """A position in a stream, which belongs to one rank."""

    def __init__(self) -> None:
        self.place = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "name": "stream"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["name"] == "stream"
        self.place = state["place"]


def test_per_rank_state_is_restored(session: LocalSession) -> None:
    stream = Stream()
    first = TrainingProcess(per_rank={"stream": stream})
    stream.place += 7
    first.train(4)
    first.end()
    again = Stream()
    assert TrainingProcess(per_rank={"stream": again}).ckpt.restore() is not None
    assert again.place == 7


def test_per_rank_state_is_rejected_at_another_world_size(session: LocalSession) -> None:
    TrainingProcess(per_rank={"stream": Stream()}).train(4)
    second = TrainingProcess(per_rank={"stream": Stream()})
    second.ckpt._world_size = 2
    with pytest.raises(ConfigError, match="stream was saved under per_rank= at world size 1"):
        second.ckpt.restore()


class Kept(DataLoader[Any]):
    """A stateful loader."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_rank": {"stream": Stream()}}, r"per_rank=.* \(stream\) can only be restored"),
        ({"loader": Kept(Squares())}, "the position of loader= can only be restored"),
    ],
)
def test_rank_bound_state_is_rejected_in_an_elastic_group(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    Checkpointer(model=nn.Linear(1, 1), **arguments)
    monkeypatch.setattr(LocalSnapshotChannel, "outlook", lambda _: GroupOutlook(allows_resize=True))
    with pytest.raises(ConfigError, match=message) as error:
        Checkpointer(model=nn.Linear(1, 1), **arguments)
    assert is_permanent_error(error.value)
    Checkpointer(model=nn.Linear(1, 1), loader=DataLoader(Squares()), extra={"all": Stream()})


def test_a_rejected_restore_is_a_permanent_error(session: LocalSession) -> None:
    TrainingProcess().train(4)
    with pytest.raises(ConfigError, match=r"does not match the model and") as error:
        Checkpointer(model=nn.Linear(3, 3)).restore()
    assert is_permanent_error(error.value)


def test_accumulating_steps_save_nothing(session: LocalSession) -> None:
    process = TrainingProcess(every=2)
    for _ in range(3):
        process.ckpt.step(accumulating=True)
    assert session.latest_checkpoint() is None
    process.train(4)
    process.end()
    restored = TrainingProcess().ckpt.restore()
    assert restored is not None
    assert restored.step == 4


def test_a_save_with_pending_gradients_logs_a_warning(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = Checkpointer(model=nn.Linear(1, 1), every="at_notice")
    for accumulating in (True, False):
        ckpt.step(accumulating=accumulating)
        ckpt.save()
        assert ("checkpoint.pending_gradients_not_saved" in capsys.readouterr().err) == accumulating
    ckpt.step(accumulating=True)
    assert ckpt.restore() is not None
    ckpt.save()
    assert "checkpoint.pending_gradients_not_saved" not in capsys.readouterr().err


def test_an_epoch_that_ends_while_accumulating_is_saved_at_the_next_step(
    session: LocalSession,
) -> None:
    process = TrainingProcess(every="epoch")
    for epoch in range(2):
        for n, _ in enumerate(process.loader):
            process.ckpt.step(accumulating=n % 4 != 3)
        assert (session.latest_checkpoint() is not None) == (epoch == 1)


class FrameworkLoop(TrainingProcess):
    """A loop as frameworks have them: it counts batches, and has work to do after the last one."""

    epoch = 0
    ended_epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "ended_epochs": self.ended_epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.ended_epochs = state["epoch"], state["ended_epochs"]

    def __init__(self, **options: Any) -> None:
        super().__init__(extra={"loop": self}, **options)
        self.average.shadow = torch.zeros(1)  # not used by this loop

    def train(self, steps: int) -> list[float]:
        while True:
            batches = iter(self.loader)
            last = (self.ckpt.steps // 6 + 1) * 6
            while self.ckpt.steps < last:
                self.samples += (batch := next(batches))[:, 0].tolist()
                self.optimizer.zero_grad()
                self.model(batch / 24).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                self.ckpt.step(hold=self.ckpt.steps + 1 == last)
                if self.ckpt.steps == steps and steps != last:
                    return self.everything()
            self.ended_epochs, self.epoch = self.ended_epochs + 1, self.epoch + 1
            self.ckpt.end_epoch()
            self.ckpt.save_if_due({"epoch": self.epoch})
            if self.ckpt.steps == steps:
                return self.everything()


@pytest.mark.parametrize("saved_at", [4, 6, 8, 12])
def test_a_loop_that_does_not_exhaust_its_iterator_resumes_exactly(
    session: LocalSession, saved_at: int
) -> None:
    undisturbed = FrameworkLoop(every=100)
    end = undisturbed.train(15)
    undisturbed.end()
    first = FrameworkLoop(every=saved_at)
    first.train(saved_at)
    first.end()
    second = FrameworkLoop()
    restored = second.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.epoch) == (saved_at, saved_at // 6)
    assert second.train(15) == end
    assert second.ended_epochs == undisturbed.ended_epochs == 2
    assert first.samples + second.samples == undisturbed.samples


@pytest.mark.parametrize("every", [3, "epoch"])
def test_a_held_save_is_taken_once_at_the_end_of_the_epoch(
    session: LocalSession, every: Any
) -> None:
    process = FrameworkLoop(every=every)
    process.train(6)
    assert session.metrics == {"epoch": 1}
    saves = process.ckpt._save_count
    process.ckpt.save_if_due({"epoch": 2})
    assert (process.ckpt._save_count, saves) == (saves, {3: 2, "epoch": 1}[every])


def test_an_epoch_that_the_loop_ends_early_is_saved(session: LocalSession) -> None:
    process = TrainingProcess(every="epoch")
    next(iter(process.loader))
    process.ckpt.step(hold=True)
    process.ckpt.end_epoch()
    process.ckpt.save_if_due()
    second = TrainingProcess()
    restored = second.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.epoch) == (1, 1)


def test_a_held_step_with_pending_gradients_is_not_saved(session: LocalSession) -> None:
    process = TrainingProcess(every=1)
    process.ckpt.step(accumulating=True, hold=True)
    process.ckpt.save_if_due()
    assert session.latest_checkpoint() is None


def test_the_metrics_of_a_held_step_are_saved_at_the_end(session: LocalSession) -> None:
    process = TrainingProcess(every=100)
    process.ckpt.step({"loss": 2.0}, hold=True)
    assert bytes(end_of(session).metrics) == b'{"loss":2.0}'


def test_the_restored_rng_state_can_be_set_again_until_the_next_step(
    session: LocalSession,
) -> None:
    first = TrainingProcess(every=4)
    first.train(4)
    drawn_after_saving = torch.rand(3).tolist()
    first.end()
    second = TrainingProcess()
    second.ckpt.restore_rng_state()  # nothing was restored yet
    second.ckpt.restore()
    next(iter(second.loader)), torch.rand(5)
    second.ckpt.restore_rng_state()
    assert torch.rand(3).tolist() == drawn_after_saving
    second.ckpt.step()
    torch.manual_seed(1)
    second.ckpt.restore_rng_state()
    assert torch.initial_seed() == 1, "random numbers of the training must not repeat"


def test_incomplete_epochs_are_logged_once(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    process = TrainingProcess(every="epoch")
    for _ in range(2):
        for _ in process.loader:
            process.ckpt.step()
        list(process.loader)  # a pass without training
        next(iter(process.loader))
    assert "WARNING" not in capsys.readouterr().err
    for _ in range(3):
        for n, _ in enumerate(process.loader):
            if n == 4:
                break
            process.ckpt.step()
    output = capsys.readouterr().err
    assert output.count("checkpoint.epoch_end_missed") == 1
    assert "5 of 6 batches had been read and step() had been called for 4" in output


def test_a_roll_back_within_an_epoch_does_not_end_it(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    process = TrainingProcess(every=[4, "epoch"])
    for _ in range(2):
        for _ in process.loader:
            process.ckpt.step()
            if process.ckpt.steps == 5:
                assert process.ckpt.restore() is not None
                break
    assert "checkpoint.epoch_end_missed" not in capsys.readouterr().err


@pytest.mark.parametrize("every", ["epoch", 5])
def test_a_loader_that_is_created_per_epoch_is_logged_once(
    session: LocalSession, capsys: pytest.CaptureFixture[str], every: Any
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Squares(), batch_size=4)

    ckpt = Checkpointer(model=nn.Linear(1, 1), loader=loader(), every=every)
    for _ in range(3):
        for _ in loader():
            ckpt.step()
    output = capsys.readouterr().err
    assert output.count("checkpoint.loader_mismatch") == 1
    assert output.count("checkpoint.snapshot") == (1 if every == "epoch" else 3)


def test_epochs_of_different_length_are_rejected(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spotfit.torch.checkpoint.checkpointer.all_gather", lambda value: [value, 7]
    )
    with pytest.raises(ConfigError, match=r"the ranks have \[6, 7\] batches"):
        TrainingProcess(every="epoch")
    assert session.latest_checkpoint() is None


def test_invalid_metrics_are_rejected_at_the_first_step(session: LocalSession) -> None:
    process = TrainingProcess(every=100)
    with pytest.raises(ConfigError, match="loss"):
        process.ckpt.step({"loss": torch.ones(1)})


def test_a_rank_with_unsupported_state_skips_the_save(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream()
    process = TrainingProcess(per_rank={"stream": stream})
    stream.place = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="only be pickled"):
        process.ckpt.save()
    assert "checkpoint.skipped" in capsys.readouterr().err
    assert session.latest_checkpoint() is None


def test_a_rank_with_invalid_metrics_skips_the_save(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    process = TrainingProcess(every=100)
    with pytest.raises(ConfigError, match="loss"):
        process.ckpt.save({"loss": torch.ones(1)})
    assert "checkpoint.skipped" in capsys.readouterr().err
    assert session.latest_checkpoint() is None


def test_restore_after_saves_rolls_back_to_the_latest_checkpoint(
    session: LocalSession, memory_segments: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments: list[set[Path]] = []
    folder = session.snapshot_channel.segment_dirs[0]
    record = lambda: segments.append({*folder.glob("*.segment")})  # noqa: E731
    monkeypatch.setattr(session.snapshot_channel, "roll_back", record)
    early = TrainingProcess(every=4)
    early.train(5)
    memory_segments.append(early.newest_segment)
    early.end()
    before = {*folder.glob("*.segment")}
    process = TrainingProcess(every=4)
    assert process.ckpt.restore() == ("", 4, 0, "memory")
    assert process.ckpt.restore() == ("", 4, 0, "memory")
    process.train(9)
    restored = process.ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source, process.ckpt.steps) == (8, "bucket", 8)
    assert {*folder.glob("*.segment")} == before, "no newer snapshot is left in memory"
    assert segments == [before], "nor on other machines"
    process.train(13)
    again = process.ckpt.restore()
    assert again is not None
    assert again.step == 12


def test_a_corrupt_checkpoint_is_not_restored(session: LocalSession) -> None:
    TrainingProcess().train(4)
    for chunk in session.snapshot_channel.segment_dirs[0].parent.glob("checkpoint_*/chunks/*"):
        body = bytearray(chunk.read_bytes())
        body[0] ^= 1
        chunk.write_bytes(body)
    with pytest.raises(IntegrityError, match="None of this run's checkpoints can be read"):
        TrainingProcess().ckpt.restore()


@pytest.fixture
def memory_segments(session: LocalSession, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Segments that the channel returns as the snapshot in memory."""
    paths: list[Path] = []

    def open_snapshot() -> SavedState:
        return SavedState(
            [MemoryShardReader(ShmSegment.open(path)) for path in paths], IN_MEMORY_NAME
        )

    reopen = session.snapshot_channel.reopen

    def reopen_snapshot(opened: SavedStateDescriptor) -> SavedState:
        return open_snapshot() if opened.name == IN_MEMORY_NAME else reopen(opened)

    monkeypatch.setattr(session.snapshot_channel, "open_in_memory", open_snapshot)
    monkeypatch.setattr(session.snapshot_channel, "reopen", reopen_snapshot)
    return paths


@pytest.mark.parametrize("initial_step", [0, 1, 2])
def test_a_state_restored_from_memory_is_saved_at_the_end_unless_a_checkpoint_has_it(
    session: LocalSession,
    monkeypatch: pytest.MonkeyPatch,
    memory_segments: list[Path],
    initial_step: int,
) -> None:
    monkeypatch.setattr(LocalSnapshotChannel, "initial_step", initial_step)
    process = TrainingProcess(every=2)
    process.train(2)
    memory_segments.append(process.newest_segment)
    second = TrainingProcess(every=100)
    second.ckpt.restore()
    end = end_of(session)
    assert (end.step, end.saved_step) == (2, initial_step)
    assert end.has_snapshot == (initial_step < 2)


def test_a_snapshot_in_memory_is_preferred_to_a_checkpoint(
    session: LocalSession, memory_segments: list[Path]
) -> None:
    undisturbed = TrainingProcess(every=100).train(15)
    first = TrainingProcess(every=4)
    first.train(9)
    memory_segments.append(first.newest_segment)
    first.end()
    second = TrainingProcess()
    restored = second.ckpt.restore()
    assert restored == ("", 8, 1, "memory")
    assert second.train(15) == undisturbed


def test_a_save_before_the_first_step_changes_nothing(session: LocalSession) -> None:
    """torch's own function takes a dummy step with an optimizer without state."""
    undisturbed = TrainingProcess(every=100).train(15)
    early = TrainingProcess(every=100)
    early.ckpt.save()
    assert early.train(15) == undisturbed
    early.end()
    second = TrainingProcess()
    assert second.ckpt.restore() is not None
    assert second.train(15) == undisturbed


@pytest.mark.parametrize("initial_checkpoint", [None, "a report"])
def test_a_partially_read_state_is_rolled_back_without_a_checkpoint(
    session: LocalSession,
    memory_segments: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    initial_checkpoint: str | None,
) -> None:
    undisturbed = TrainingProcess(every=100).train(15)
    first = TrainingProcess(every=4)
    first.train(5)
    memory_segments.append(first.newest_segment)
    first.end()
    monkeypatch.setattr(type(session.snapshot_channel), "initial_checkpoint", initial_checkpoint)
    monkeypatch.setattr(type(session.snapshot_channel), "has_snapshots", False)
    monkeypatch.setattr(session.snapshot_channel, "open_checkpoint", lambda name: None)
    monkeypatch.setattr(restore_candidates, "read_chunks", read_then_fail)
    second = TrainingProcess()
    assert second.ckpt.restore() is None
    assert second.train(15) == undisturbed


def read_then_fail(orders: Sequence[ChunkRead]) -> None:
    """Deliver all chunks and then fail, as if the other machine were lost."""
    read_chunks(orders)
    raise IntegrityError("the other machine is gone")


def test_the_backup_is_released_after_the_restore(
    session: LocalSession, memory_segments: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TrainingProcess(every=4)
    first.train(5)
    memory_segments.append(first.newest_segment)
    first.end()
    monkeypatch.setattr(type(session.snapshot_channel), "has_snapshots", False)
    copies: list[weakref.ref[Any]] = []

    def recording_backup(in_use: dict[str, Any]) -> Callable[[], None]:
        put_back = backup_tensors(in_use)
        copies.append(weakref.ref(put_back))
        return put_back

    monkeypatch.setattr("spotfit.torch.checkpoint.training_state.backup_tensors", recording_backup)
    second = TrainingProcess()
    assert second.ckpt.restore() is not None
    gc.collect()
    assert [copy() for copy in copies] == [None]


def test_with_a_corrupt_snapshot_in_memory_the_checkpoint_is_restored(
    session: LocalSession, memory_segments: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    TrainingProcess(every=4).train(5)
    memory_segments.append(session.snapshot_channel.segment_dirs[0] / "missing.segment")
    restored = TrainingProcess().ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source) == (4, "bucket")
    assert "checkpoint.corrupt" in capsys.readouterr().err


def test_a_corrupt_snapshot_without_a_checkpoint_is_ignored(
    session: LocalSession, memory_segments: list[Path]
) -> None:
    memory_segments.append(session.snapshot_channel.segment_dirs[0] / "missing.segment")
    assert TrainingProcess().ckpt.restore() is None
    shutil.os.makedirs(session.snapshot_channel.segment_dirs[0], exist_ok=True)  # type: ignore[attr-defined]


def test_without_space_the_save_is_skipped(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, capacity_bytes: int, index_bytes: int = 0) -> ShmSegment:
        raise OSError("No space left on device")

    monkeypatch.setattr(ShmSegment, "create", full)
    TrainingProcess().train(5)
    assert "checkpoint.skipped" in capsys.readouterr().err
    assert session.latest_checkpoint() is None


def test_unsupported_objects_are_rejected_at_creation(session: LocalSession) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(
        ConfigError, match=r"extra\['clock'\] is an object, which has no state_dict"
    ):
        Checkpointer(model=model, extra={"clock": object()})
    with pytest.raises(ConfigError, match="uses the reserved names model"):
        Checkpointer(model=model, extra={"model": model})
    assert session.snapshot_channel.segment_dirs


class Best:
    """A user-defined score that is set late."""

    def __init__(self) -> None:
        self.score: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score = state["score"]


def test_every_save_checks_its_values(session: LocalSession) -> None:
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
    with pytest.raises(
        ConfigError, match=r"The state of stateful_objects\.best\.structure\.score contains"
    ):
        ckpt.save()
    assert ckpt.restore() is not None


class Numbers(IterableDataset[torch.Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4.0)


@pytest.mark.parametrize("every", ["epoch", ["10m", "epoch"]])
@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (None, "loader= is missing"),
        (DataLoader(Numbers()), "length of loader= is unknown"),
        (DataLoader(Squares(), batch_sampler=[[1], [2]]), "length of loader= is unknown"),
        (
            DataLoader(Squares(), sampler=WeightedRandomSampler([1.0], 5)),
            "with the default samplers or a DistributedSampler",
        ),
    ],
)
def test_epoch_saves_with_an_unknown_length_are_rejected(
    session: LocalSession, loader: Any, reason: str, every: Any
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Checkpointer(model=nn.Linear(1, 1), loader=loader, every=every)
    shutil.os.makedirs(session.snapshot_channel.segment_dirs[0], exist_ok=True)  # type: ignore[attr-defined]


def test_epochs_of_a_loader_without_a_length_are_counted(session: LocalSession) -> None:
    def start(steps: int) -> tuple[int, list[int]]:
        """The loop of the guide: three epochs of four batches."""
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

    assert start(10) == (0, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert start(-1) == (2, [2, 2, 2, 2])


def test_another_model_is_rejected_and_another_dtype_logged(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpointer(model=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))).save()
    with pytest.raises(ConfigError, match=r"model\.1\.bias, model\.1\.weight would be lost"):
        Checkpointer(model=nn.Sequential(nn.Linear(1, 1))).restore()
    halves = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).bfloat16()
    assert Checkpointer(model=halves).restore() is not None
    assert "checkpoint.dtype_changed" in capsys.readouterr().err


def test_unfrozen_weights_must_be_in_the_optimizer_before_restore(
    session: LocalSession,
) -> None:
    def start(*, unfrozen: bool) -> Checkpointer:
        body, head = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.Adam(head.parameters())
        if unfrozen:
            optimizer.add_param_group({"params": [*body.parameters()]})
        model = nn.Sequential(body, head)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer)

    start(unfrozen=True).save()
    with pytest.raises(ConfigError, match=r"state of 0\.bias, 0\.weight would be lost"):
        start(unfrozen=False).restore()
    assert start(unfrozen=True).restore() is not None


@pytest.mark.parametrize("stepped", [False, True])
def test_a_rejected_restore_changes_nothing(session: LocalSession, stepped: bool) -> None:
    """Both with allocated and with existing optimizer state."""
    TrainingProcess().train(5)
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
    ("options", "reason"),
    [
        ({"per_rank": {"stream": Stream()}}, "stream was saved under per_rank= at world size 1"),
        ({"loader": DataLoader(Squares())}, "only at the world size"),
    ],
)
def test_another_world_size_is_rejected_before_reading(
    session: LocalSession, options: Any, reason: str
) -> None:
    Checkpointer(model=nn.Linear(1, 1), per_rank={"stream": Stream()}).save()
    model = nn.Linear(1, 1)
    before = str(model.state_dict())
    ckpt = Checkpointer(model=model, **options)
    ckpt._world_size = 2
    if isinstance(ckpt._data_position, SamplerPosition):
        ckpt._data_position._is_shared = False  # as on two
    with pytest.raises(ConfigError, match=reason):
        ckpt.restore()
    assert str(model.state_dict()) == before


def test_names_missing_on_one_rank_may_exist_on_another(
    session: LocalSession,
) -> None:
    """Each rank may hold a part of the model; names are compared before reading."""
    Checkpointer(model=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))).save()
    first = Checkpointer(model=nn.Sequential(nn.Linear(1, 1)))
    other = StateCompatibility(frozenset(), frozenset(), frozenset())

    def record_gather(value: Any) -> list[Any]:
        return (
            [value, value._replace(compatibility=other)]
            if hasattr(value, "compatibility")
            else [value]
        )

    first._restore_selector._all_gather = record_gather
    assert first.restore() is not None


def test_missing_ranks_are_detected_before_torch_collectives(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's collectives time out after half an hour and do not name the missing rank."""
    met: list[str] = []

    def agreed(kind: str, value: bytes) -> bytes:
        met.append(kind)
        return value

    def record_gather(value: Any) -> list[Any]:
        met.append("torch")
        return [value]

    monkeypatch.setattr(session.snapshot_channel, "broadcast_bytes", agreed)
    monkeypatch.setattr(checkpointer, "all_gather", record_gather)
    monkeypatch.setattr(checkpointer, "broadcast", lambda value: record_gather(value)[0])
    process = TrainingProcess(every="epoch")
    assert met == ["Checkpointer", "torch"]
    del met[:]
    process.ckpt.restore()
    assert met == ["Checkpointer.restore", "torch"]
    del met[:]
    process.ckpt.save()
    assert met[:2] == ["Checkpointer.save", "torch"]
    process.ckpt.save()
    assert met.count("Checkpointer.save") == 1, "snapshots need no collective"


def test_new_and_renamed_objects_keep_their_state_and_are_logged(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    was, now = Best(), Best()
    was.score, now.score = 0.5, 0.25
    Checkpointer(model=nn.Linear(1, 1), extra={"a": was, "b": was}, per_rank={"c": was}).save()
    again = Best()
    options: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu"), "per_rank": {"f": now}}
    ckpt = Checkpointer(model=nn.Linear(1, 1), extra={"b": again, "e": now}, **options)
    assert ckpt.restore() is not None
    assert (again.score, now.score) == (0.5, 0.25)
    output = capsys.readouterr().err
    assert re.search(r"checkpoint\.unused_state names=.*'a', 'c'\]", output)
    assert re.search(r"checkpoint\.state_not_restored names=.*'e', 'f', 'scaler'\]", output)


def trained_model(steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
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
def test_a_new_scheduler_keeps_its_options(
    session: LocalSession,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[torch.optim.Optimizer], Any],
) -> None:
    """torch's schedulers add options to param_groups, which were not saved."""
    model, optimizer = trained_model(2)
    Checkpointer(model=model, optimizer=optimizer).save()
    again, its_optimizer = trained_model()
    scheduler = make(its_optimizer)
    written = its_optimizer.param_groups[0]["initial_lr"]
    ckpt = Checkpointer(model=again, optimizer=its_optimizer, scheduler=scheduler)
    assert ckpt.restore() is not None
    output = capsys.readouterr().err
    assert re.search(
        r"checkpoint\.state_not_restored names=.*'scheduler'.*optimizer's initial_lr", output
    )
    (group,) = its_optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.25, written)
    assert str(its_optimizer.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    its_optimizer.step()
    scheduler.step()
    assert group["lr"] != 0.25
    ckpt.save()


def test_a_new_optimizer_keeps_its_state(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = trained_model(2)
    Checkpointer(model=model).save()
    again, optimizer = trained_model(1)
    before = str(optimizer.state_dict())
    assert Checkpointer(model=again, optimizer=optimizer).restore() is not None
    assert str(again.state_dict()) == str(model.state_dict())
    assert str(optimizer.state_dict()) == before
    assert "checkpoint.state_not_restored names=['optimizer']" in capsys.readouterr().err


def test_new_weights_in_a_group_are_accepted_and_new_groups_rejected(
    session: LocalSession,
) -> None:
    def start(*, added: str = "") -> Checkpointer:
        body, head = nn.Linear(1, 1), nn.Linear(1, 1)
        weights = [*head.parameters(), *(body.parameters() if added == "weights" else ())]
        optimizer = torch.optim.Adam(weights)
        if added == "group":
            optimizer.add_param_group({"params": [*body.parameters()]})
        model = nn.Sequential(body, head)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer)

    start().save()
    with pytest.raises(ConfigError, match=r"has 1 more param_groups"):
        start(added="group").restore()
    assert start(added="weights").restore() is not None


@pytest.mark.parametrize("trained", [0, 3])
def test_an_added_or_removed_loader_is_logged(
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
    assert "checkpoint.unused_state names=['loader']" in capsys.readouterr().err
    second.save()
    assert Checkpointer(model=nn.Linear(1, 1), loader=DataLoader(Squares())).restore() is not None
    assert "checkpoint.state_not_restored names=['loader']" in capsys.readouterr().err


class Failing(Best):
    """An object whose state_dict raises."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no such file")


def test_an_exception_in_state_dict_changes_nothing(session: LocalSession) -> None:
    """The optimizer's state was already allocated, but not read."""
    model, optimizer = trained_model(2)
    Checkpointer(model=model, optimizer=optimizer, extra={"best": Best()}).save()
    again, its_optimizer = trained_model()
    ckpt = Checkpointer(model=again, optimizer=its_optimizer, extra={"best": Failing()})
    with pytest.raises(RuntimeError, match="no such file"):
        ckpt.restore()
    assert not its_optimizer.state


def test_objects_moved_between_extra_and_per_rank_are_rejected(
    session: LocalSession,
) -> None:
    """Otherwise the object would silently be reset."""
    Checkpointer(model=nn.Linear(1, 1), extra={"a": Best()}, per_rank={"b": Best()}).save()
    with pytest.raises(ConfigError, match=r"'a' was saved under extra= but is passed as per_rank="):
        Checkpointer(model=nn.Linear(1, 1), per_rank={"a": Best(), "b": Best()}).restore()
    with pytest.raises(ConfigError, match=r"'b' was saved under per_rank= but is passed as extra="):
        Checkpointer(model=nn.Linear(1, 1), extra={"a": Best(), "b": Best()}).restore()


def test_a_model_is_restored_alone_and_unused_state_is_logged(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    process = TrainingProcess()
    process.train(4)
    alone = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    restored = Checkpointer(model=alone).restore()
    assert restored is not None
    assert restored.step == 4
    assert str(alone.state_dict()) == str(process.model.state_dict())
    output = capsys.readouterr().err
    assert "checkpoint.unused_state" in output
    assert "['average', 'loader', 'optimizer', 'scheduler']" in output


def test_an_empty_param_group_may_be_removed(session: LocalSession) -> None:
    def start(*groups: tuple[int, float]) -> tuple[Checkpointer, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        param_groups = [
            {"params": [*model[at].parameters()] if at >= 0 else [], "lr": lr} for at, lr in groups
        ]
        optimizer = torch.optim.Adam(param_groups)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        return Checkpointer(model=model, optimizer=optimizer), optimizer

    start((-1, 0.5), (0, 0.25), (1, 0.125))[0].save()
    ckpt, optimizer = start((0, 0.0), (1, 0.0))
    assert ckpt.restore() is not None
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


class Strict(Best):
    """An object that rejects its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("module.weight")


@pytest.mark.parametrize("kind", ["extra", "per_rank"])
def test_an_object_that_rejects_its_state_is_named(session: LocalSession, kind: str) -> None:
    options: Any = {kind: {"ema": Strict()}}
    Checkpointer(model=nn.Linear(1, 1), **options).save()
    with pytest.raises(ConfigError, match=r"ema \(Strict\) rejected .*'module\.weight'") as error:
        Checkpointer(model=nn.Linear(1, 1), **options).restore()
    assert not is_permanent_error(error.value), "user code may fail temporarily"


@pytest.mark.parametrize(("was", "is_on"), [(False, True), (False, False), (True, False)])
def test_a_scaler_that_is_enabled_later_is_not_restored(
    session: LocalSession, capsys: pytest.CaptureFixture[str], was: bool, is_on: bool
) -> None:
    def ckpt(*, enabled: bool) -> Checkpointer:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return Checkpointer(model=nn.Linear(1, 1), scaler=scaler)

    ckpt(enabled=was).save()
    assert ckpt(enabled=is_on).restore() is not None
    output = capsys.readouterr().err
    assert ("checkpoint.state_not_restored" in output) == (is_on and not was)


@pytest.mark.parametrize("kind", ["extra", "per_rank"])
def test_unsupported_state_is_rejected_at_the_first_step(session: LocalSession, kind: str) -> None:
    best = Best()
    best.score = object()
    options: Any = {kind: {"best": best}}
    ckpt = Checkpointer(model=nn.Linear(1, 1), every=100, **options)
    with pytest.raises(
        ConfigError, match=r"best\.(structure\.)?score contains objects that can only"
    ):
        ckpt.step()


def test_state_is_checked_only_at_the_first_step(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def state_dict() -> dict[str, Any]:
        looks.append("look")
        return {}

    best = Best()
    monkeypatch.setattr(best, "state_dict", state_dict)
    ckpt = Checkpointer(model=nn.Linear(1, 1), every=100, per_rank={"best": best})
    for _ in range(5):
        ckpt.step()
    assert looks == ["look"]


def test_extra_state_of_another_size_is_restored(session: LocalSession) -> None:
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


def test_a_loop_that_prefetches_the_next_epoch_is_logged(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def ahead(loader: Iterable[Any]) -> Iterator[Any]:
        batches = (batch for _ in range(2) for batch in loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held

    process = TrainingProcess(every="epoch")
    for _ in ahead(process.loader):
        process.ckpt.step()
    output = capsys.readouterr().err
    assert "when the next epoch began, 6 of 6 batches had been read" in output
    assert "do not prefetch batches of the next epoch" in output


def test_unused_saved_objects_are_logged(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpointer(
        model=nn.Linear(1, 1), extra={"best": Best(), "ema": Best()}, per_rank={"stream": Best()}
    ).save()
    assert Checkpointer(model=nn.Linear(1, 1), extra={"best": Best()}).restore() is not None
    output = capsys.readouterr().err
    assert "checkpoint.unused_state" in output
    assert "['ema', 'stream']" in output
    model, extra = nn.Linear(1, 1), {"best": Best(), "ema": Best()}
    assert Checkpointer(model=model, extra=extra, per_rank={"stream": Best()}).restore() is not None
    assert "checkpoint.unused_state" not in capsys.readouterr().err


def test_a_state_saved_after_an_epoch_does_not_repeat_its_end(
    session: LocalSession,
) -> None:
    def start(ends: int) -> list[float]:
        """Halve the learning rate after each of three epochs, then save."""
        start = TrainingProcess(every="at_notice")
        start.end()
        rates = torch.optim.lr_scheduler.StepLR(start.optimizer, 1, 0.5)
        ckpt = Checkpointer(
            model=start.model, optimizer=start.optimizer, scheduler=rates, loader=start.loader
        )
        restored = ckpt.restore()
        learning_rates = []
        for epoch in range(restored.epoch if restored else 0, 3):
            for batch in start.loader:
                learning_rates.append(float(rates.get_last_lr()[0]))
                start.model(batch / 24).sum().backward()
                start.optimizer.step()
                ckpt.step()
            rates.step()
            ckpt.save()
            if epoch == ends:
                break
        return learning_rates

    assert start(0) + start(2) == [0.05] * 6 + [0.025] * 6 + [0.0125] * 6


def test_a_second_checkpointer_is_rejected_also_after_the_first(
    single_session: LocalSession,
) -> None:
    """Each would restore the checkpoints of the other."""
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    ckpt = Checkpointer(model=student)
    with pytest.raises(ConfigError, match="already has a Checkpointer"):
        Checkpointer(model=teacher)
    ckpt.save()
    del ckpt
    with pytest.raises(ConfigError, match="separate runs"):
        Checkpointer(model=teacher)


def test_a_module_dict_of_several_models_is_saved(session: LocalSession) -> None:
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    both = Checkpointer(model=nn.ModuleDict({"student": student, "teacher": teacher}))
    both.save()
    assert both.restore() is not None


def test_a_rejected_checkpointer_does_not_count(single_session: LocalSession) -> None:
    with pytest.raises(ConfigError):
        Checkpointer(model=nn.Linear(1, 1), every="often")  # type: ignore[arg-type]
    assert Checkpointer(model=nn.Linear(1, 1)).restore() is None


def test_a_pass_that_was_left_by_break_is_continued(session: LocalSession) -> None:
    """A break may mean the end of the epoch or of the process; it is treated as the latter."""
    first = TrainingProcess(every="at_notice")
    for n, batch in enumerate(first.loader):
        first.samples += batch[:, 0].tolist()
        first.ckpt.step()
        if n == 2:
            break
    first.ckpt.save()
    first.end()
    second = TrainingProcess()
    assert second.ckpt.restore() == ("checkpoint_000000", 3, 0, "bucket")
    rest = [place for batch in second.loader for place in batch[:, 0].tolist()]
    assert sorted(first.samples + rest) == list(range(24))


def test_workers_without_a_process_group_are_rejected() -> None:
    training_api.set_session(LocalSession("run", LauncherGroup(Ranks(world_rank=1, world_size=2))))
    try:
        with pytest.raises(ConfigError, match="process group of all 2 workers"):
            Checkpointer(model=nn.Linear(1, 1))
    finally:
        training_api.clear_session()


def test_a_checkpointer_outside_of_a_training_function_is_rejected() -> None:
    with pytest.raises(SessionMisuseError):
        spotfit.torch.Checkpointer(model=nn.Linear(1, 1))


def test_memory_is_allocated_with_the_current_gpu_of_the_training(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins with GPU 0, where pinning would create a context."""
    entered: list[bool] = []
    inside = threading.local()

    @contextmanager
    def keep_current_gpu() -> Iterator[None]:
        inside.it = True
        yield
        inside.it = False

    reserve = ShmArena.reserve

    def recording(arena: ShmArena, *args: Any, **options: Any) -> None:
        entered.append(getattr(inside, "it", False))
        reserve(arena, *args, **options)

    monkeypatch.setattr(training_state, "keep_current_gpu", keep_current_gpu)
    monkeypatch.setattr(ShmArena, "reserve", recording)
    process = TrainingProcess(every=100)
    process.train(1)
    assert process.ckpt._allocation_thread is not None
    process.ckpt._allocation_thread.join()
    assert entered == [True, True]


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_restore_waits_for_what_the_training_has_queued(
    session: LocalSession, device: str
) -> None:
    """The chunks are copied by other threads, which do not know the training's stream."""

    def start() -> tuple[nn.Linear, Checkpointer]:
        model = nn.Linear(512, 512, device=device)
        return model, Checkpointer(model=model, every=10**6)

    before, first = start()
    first.step()
    first.save()
    after, second = start()
    is_gpu = device == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if is_gpu else nullcontext():  # type: ignore[no-untyped-call]
        if is_gpu:
            torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # half a second
        after.weight.detach().zero_()
        assert second.restore() is not None
        assert torch.equal(after.weight.cpu(), before.weight.cpu())
