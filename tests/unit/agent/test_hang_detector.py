"""Tests of the hang detector: request, storage and report of stacks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spotfit.agent.hang_detector import STACK_DUMP_TIMEOUT_S, HangDetector, describe_waits
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.control.background_calls import BackgroundResult, SynchronousCalls
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.spec import HangDetectionConfig
from spotfit.protocol.agent_leader import DumpStacks, StackDump
from spotfit.protocol.worker_agent import FromWorker, FunctionStarted, MetricsReport
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID

ME = AgentId("a-1")
KEY = keys.stack_dump(ME, 3, 1)


class DelayedCalls(SynchronousCalls):
    """Background calls that complete when the test allows it."""

    completes_at_once = True

    def run(self, name: str, job: Any) -> BackgroundResult | None:
        return super().run(name, job) if self.completes_at_once else None


class Harness:
    """Round 3 of two workers started at 100 s; a minute without progress is a hang."""

    def __init__(self, **options: Any) -> None:
        self.stack_requests: list[DumpStacks] = []
        self.store, self.background_calls = MemoryStore(), DelayedCalls()
        self.coordinator = RoundCoordinator(3, 2, default_checkpoint_name=str, now=100.0)
        self.detector = HangDetector(
            self.coordinator,
            HangDetectionConfig(**{"no_progress_timeout_s": 60.0, **options}),
            request_stacks=self.stack_requests.append,
            ledger=Ledger(self.store, RUN_ID, ME),
            background_calls=self.background_calls,
        )
        for rank in (0, 1):
            self.send_frame(rank, FunctionStarted(), 100.0)

    def send_frame(self, rank: int, frame: FromWorker, now: float) -> None:
        self.coordinator.handle_frame(rank, msgspec.Raw(encode(frame)), now)

    def add_stack_dumps(self, *ranks: int, number: int = 1) -> None:
        for rank in ranks:
            self.detector.add_stack_dump(
                StackDump(round=3, dump_id=number, rank=rank, stack_text=f"stack of {rank}")
            )


def test_without_a_hang_no_stacks_are_requested() -> None:
    harness = Harness()
    assert harness.detector.check(159.0) is None
    assert harness.stack_requests == []
    assert harness.detector.next_check() == 160.0


def test_a_hang_is_reported_after_all_stacks_are_stored() -> None:
    harness = Harness()
    assert harness.detector.check(160.0) is None
    assert harness.stack_requests == [DumpStacks(round=3, dump_id=1)]
    harness.add_stack_dumps(1)
    assert harness.detector.check(161.0) is None
    harness.add_stack_dumps(0)
    found = harness.detector.check(162.0)
    assert found is not None
    assert found.text.endswith(
        f"; the stacks of all ranks are in {harness.store.url}/{KEY}".replace("//.s", "/.s")
    )
    kept = harness.store.get(KEY).decode()
    assert kept.startswith("no rank has reported")
    assert "=== rank 0: stack of 0" in kept
    assert "=== rank 1: stack of 1" in kept
    assert harness.detector.check(163.0) is None
    assert len(harness.stack_requests) == 1


def stack_of(*user_frames: str) -> str:
    """The stacks of a worker in the format of faulthandler, innermost frame first."""
    frames = [
        'File "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in wait',
        'File "/v/lib/python3.11/site-packages/spotfit/torch/loop.py", line 7 in step',
        *user_frames,
        'File "/v/lib/python3.11/site-packages/spotfit/code/code_bundle.py", line 3 in call',
        'File "/v/lib/python3.11/site-packages/spotfit/worker/main.py", line 2 in main',
    ]
    other = (
        'Thread 0x01 (most recent call first):\n  File "/project/other.py", line 1 in background'
    )
    lines = "\n".join(f"  {frame}" for frame in frames)
    current = f"Current thread 0x02 (most recent call first):\n{lines}"
    return f"process 7, kernel state: S\n{other}\n\n{current}"


def test_a_hang_names_where_each_rank_waits() -> None:
    inner, outer = (
        f'File "/project/train.py", line {n} in {f}' for n, f in ((8, "wait"), (3, "f"))
    )
    waiting = stack_of(inner, outer)
    sleeping = stack_of('File "/project/spotfit/my.py", line 10 in sleep')
    stopped = "process 7, kernel state: stopped\nNo Python stacks"
    assert describe_waits({2: waiting, 0: sleeping, 3: waiting, 1: stopped}) == [
        "ranks 2, 3 at /project/train.py:8 in wait",
        "rank 0 at /project/spotfit/my.py:10 in sleep",
    ]


def test_the_report_of_a_hang_has_the_places() -> None:
    harness = Harness()
    harness.detector.check(160.0)
    frame = 'File "/project/train.py", line 8 in wait'
    for rank in (0, 1):
        dump = StackDump(round=3, dump_id=1, rank=rank, stack_text=stack_of(frame))
        harness.detector.add_stack_dump(dump)
    found = harness.detector.check(162.0)
    assert found is not None
    assert "; ranks 0, 1 at /project/train.py:8 in wait; the stacks of all ranks are" in found.text


def test_stacks_of_suspected_ranks_come_first() -> None:
    harness = Harness()
    harness.send_frame(0, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")), 110.0)
    harness.detector.check(170.0)
    harness.add_stack_dumps(0, 1)
    assert harness.detector.check(170.0) is not None
    kept = harness.store.get(KEY).decode()
    assert kept.index("=== rank 1") < kept.index("=== rank 0")


def test_missing_stacks_are_waited_for_until_a_timeout() -> None:
    harness = Harness()
    harness.detector.check(160.0)
    harness.add_stack_dumps(0)
    assert harness.detector.next_check() == 160.0 + STACK_DUMP_TIMEOUT_S
    assert harness.detector.check(160.0 + STACK_DUMP_TIMEOUT_S) is not None
    assert "=== rank 1: its node did not send them within 30 s" in harness.store.get(KEY).decode()


def test_progress_ends_the_suspicion() -> None:
    harness = Harness()
    harness.detector.check(160.0)
    harness.send_frame(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")), 161.0)
    harness.add_stack_dumps(0, 1)
    assert harness.detector.check(162.0) is None
    assert list(harness.store.list()) == []
    harness.detector.check(221.0)
    assert harness.stack_requests[-1] == DumpStacks(round=3, dump_id=2)
    harness.add_stack_dumps(0, 1, number=1)
    assert harness.detector.check(222.0) is None, "dumps of an earlier request are ignored"


def test_missing_heartbeats_are_detected_without_progress_detection() -> None:
    harness = Harness(no_progress_timeout_s=0.0)
    assert harness.detector.next_check() == float("inf")
    harness.detector.record_liveness(1, 601.0)
    assert harness.detector.check(150.0) is None
    harness.add_stack_dumps(0, 1)
    found = harness.detector.check(151.0)
    assert found is not None
    assert (found.hang.ranks, found.hang.ends_round) == ((1,), True)


def test_a_heartbeat_ends_the_suspicion() -> None:
    harness = Harness(no_progress_timeout_s=0.0)
    harness.detector.record_liveness(1, 601.0)
    harness.detector.check(150.0)
    harness.detector.record_liveness(1, 0.0)
    harness.add_stack_dumps(0, 1)
    assert harness.detector.check(151.0) is None


def test_a_second_unresponsive_rank_is_another_hang() -> None:
    harness = Harness(no_progress_timeout_s=0.0)
    harness.detector.record_liveness(1, 601.0)
    harness.detector.check(150.0)
    harness.add_stack_dumps(0, 1)
    assert harness.detector.check(151.0) is not None
    harness.detector.record_liveness(0, 601.0)
    harness.detector.check(152.0)
    assert harness.stack_requests[-1] == DumpStacks(round=3, dump_id=2)


def test_a_hang_is_reported_although_the_bucket_hangs() -> None:
    harness = Harness()
    harness.detector.check(160.0)
    harness.add_stack_dumps(0, 1)
    harness.background_calls.completes_at_once = False
    assert harness.detector.check(160.0 + 2 * STACK_DUMP_TIMEOUT_S - 0.1) is None
    found = harness.detector.check(160.0 + 2 * STACK_DUMP_TIMEOUT_S)
    assert found is not None
    assert found.text.endswith("could not be stored: the bucket does not answer")


def test_a_failed_write_of_stacks_does_not_prevent_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    harness.detector.check(160.0)
    harness.add_stack_dumps(0, 1)
    harness.background_calls.completes_at_once = False
    assert harness.detector.check(161.0) is None
    harness.background_calls.completes_at_once = True

    def refuse(_key: str, _body: bytes) -> None:
        raise StoreError("it is full")

    monkeypatch.setattr(harness.store, "put", refuse)
    found = harness.detector.check(162.0)
    assert found is not None
    assert found.text.endswith("; their stacks could not be stored: it is full")
