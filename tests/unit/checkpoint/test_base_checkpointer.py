"""Every framework's Checkpointer saves when it is due, and restores what it has saved."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.checkpoint.base_checkpointer import load_object_state, reject_resized_per_rank
from spotfit.checkpoint.snapshot_channel import GroupOutlook, run_save_at_end
from spotfit.core.errors import ConfigError
from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel
from tests.unit.checkpoint.bytes_checkpointer import BytesCheckpointer


@pytest.fixture
def session() -> LocalSession:
    return LocalSession("run")


@pytest.fixture
def ckpt(session: LocalSession) -> BytesCheckpointer:
    return BytesCheckpointer(session)


def saved_steps(session: LocalSession) -> list[int]:
    channel = session.snapshot_channel
    opened = [channel.open_checkpoint(name) for name in channel.committed_checkpoints()]
    return sorted(saved.indices[0].step for saved in opened if saved is not None)


def test_a_restored_state_has_the_bytes_of_the_last_save(ckpt: BytesCheckpointer) -> None:
    assert ckpt.restore() is None
    for step in (b"1", b"22", b"333"):
        ckpt.step(step, b"unchanged")
    restored = ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.source, ckpt.steps) == (2, "bucket", 2)
    assert ckpt.values == [b"22", b"unchanged"]


def test_a_held_save_waits_for_the_end_of_the_epoch(
    ckpt: BytesCheckpointer, session: LocalSession
) -> None:
    ckpt.step(b"1", hold=True)
    ckpt.step(b"2", hold=True)
    assert saved_steps(session) == []
    ckpt.save_if_due()
    assert saved_steps(session) == [2]


def test_steps_that_accumulate_gradients_are_not_saved(
    ckpt: BytesCheckpointer, session: LocalSession
) -> None:
    ckpt.step(b"1", accumulating=True)
    ckpt.step(b"2", accumulating=True)
    ckpt.step(b"3")
    assert saved_steps(session) == [3]


def test_a_requested_save_is_independent_of_the_interval(
    ckpt: BytesCheckpointer, session: LocalSession
) -> None:
    ckpt.step(b"1")
    ckpt.save(b"other")
    assert saved_steps(session) == [1]


def test_the_steps_since_the_last_save_are_saved_at_the_end(
    ckpt: BytesCheckpointer, session: LocalSession
) -> None:
    for step in range(3):
        ckpt.step(bytes([step]), metrics={"loss": step})
    end = run_save_at_end(session.snapshot_channel)
    assert end is not None
    assert (end.step, end.saved_step, end.has_snapshot, end.state_digest) == (3, 2, True, "digest")
    assert saved_steps(session) == [2, 3]


def test_rng_states_are_set_until_the_next_step(ckpt: BytesCheckpointer) -> None:
    ckpt.step(b"1")
    ckpt.step(b"2")
    ckpt.restore()
    ckpt.restore_rng_state()
    ckpt.step(b"3")
    ckpt.restore_rng_state()
    assert ckpt.rng_states_set == [{"rng_state": {"seed": 7}}]


def test_a_second_checkpointer_is_rejected(ckpt: BytesCheckpointer, session: LocalSession) -> None:
    with pytest.raises(ConfigError, match="already has a Checkpointer"):
        BytesCheckpointer(session)


@pytest.mark.parametrize("total_steps", [0, 1.5, True])
def test_invalid_numbers_of_steps_are_rejected(session: LocalSession, total_steps: Any) -> None:
    with pytest.raises(ConfigError, match="total_steps must be an integer of at least 1"):
        BytesCheckpointer(session, total_steps=total_steps)


def test_state_of_one_rank_is_rejected_for_an_elastic_group(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSnapshotChannel, "outlook", lambda _: GroupOutlook(allows_resize=True))
    with pytest.raises(ConfigError, match="only be restored by the same number of workers"):
        BytesCheckpointer(session, per_rank={"stream": object()})


def test_state_of_one_rank_is_rejected_at_another_number_of_ranks() -> None:
    saved: dict[str, Any] = {"per_rank": {"stream": {}}}
    reject_resized_per_rank({"stream": object()}, saved, saved_size=2, world_size=2)
    reject_resized_per_rank({}, saved, saved_size=2, world_size=3)
    with pytest.raises(ConfigError, match="at world size 2 and cannot be restored at world size 3"):
        reject_resized_per_rank({"stream": object()}, saved, saved_size=2, world_size=3)


def test_an_object_that_rejects_its_state_is_named() -> None:
    class Broken:
        def load_state_dict(self, state: object) -> None:
            raise KeyError("gone")

    with pytest.raises(ConfigError, match=r"of stream \(Broken\) rejected .* KeyError"):
        load_object_state({}, "stream", Broken())


def test_a_save_that_fails_in_the_framework_is_skipped_for_the_other_ranks(
    session: LocalSession, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as an operation on an accelerator that has failed since it was started."""

    class Failing(BytesCheckpointer):
        def _wait_for_state(self) -> None:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        Failing(session).save(b"1")
    assert "the device is lost" in capsys.readouterr().err
    assert saved_steps(session) == []
