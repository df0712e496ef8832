"""Tests of the gates between workers and backend hooks."""

from __future__ import annotations

import msgspec

from spotfit.agent.round_coordinator import BackendHookGates, RoundCoordinator
from spotfit.core.codec import encode
from spotfit.protocol.agent_sidecar import CallWorkers
from spotfit.protocol.worker_agent import (
    AtGate,
    CallFunction,
    CallResult,
    FromWorker,
    OpenGate,
    WorkerReturned,
)
from tests.unit.agent.simulated_cluster import FakeBackendHookRunner


class GatedRound:
    """Round 3 of two workers."""

    def __init__(self) -> None:
        self.coordinator = RoundCoordinator(3, 2, default_checkpoint_name=str)
        self.hooks = FakeBackendHookRunner()
        self.staging = BackendHookGates(self.coordinator, self.hooks, {"CPU": 1})

    def send_frame(self, frame: FromWorker, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.coordinator.handle_frame(rank, msgspec.Raw(encode(frame)), 0.0)

    def to_training(self) -> None:
        self.send_frame(AtGate(phase="setup"))
        self.pass_hook()
        self.send_frame(AtGate(phase="train"))
        self.pass_hook()

    def pass_hook(self) -> None:
        assert self.staging.advance() == []
        self.hooks.unfinished = []
        assert len(self.staging.advance()) == 1


def test_a_gate_opens_after_all_ranks_wait_and_the_hook_returned() -> None:
    one = GatedRound()
    one.send_frame(AtGate(phase="setup"), 0)
    assert (one.staging.advance(), one.hooks.requested) == ([], [])
    one.send_frame(AtGate(phase="setup"), 1)
    assert one.staging.advance() == []
    assert one.hooks.requested == [("on_start", 3, 2)]
    assert one.staging.advance() == []
    one.hooks.unfinished = []
    assert one.staging.advance() == [(None, OpenGate(phase="setup"))]
    assert one.staging.advance() == []
    assert len(one.hooks.requested) == 1


def test_all_gates_open_in_order() -> None:
    one = GatedRound()
    one.to_training()
    one.send_frame(WorkerReturned(report_count=0), 0)
    assert one.staging.advance() == []
    one.send_frame(WorkerReturned(report_count=0), 1)
    assert one.staging.advance() == []
    waits = not one.staging.is_done
    one.hooks.unfinished = []
    assert one.staging.advance() == [(None, OpenGate(phase="leave"))]
    assert (waits, one.staging.is_done) == (True, True)
    hooks = [hook for hook, _, _ in one.hooks.requested]
    assert hooks == ["on_start", "on_training_start", "on_shutdown"]
    one.staging.close()
    assert len(one.hooks.requested) == 3, "the backend was already shut down"


def test_worker_calls_and_results_are_forwarded() -> None:
    one = GatedRound()
    one.hooks.calls = [
        CallWorkers(round=3, call_id=1, ranks=(0, 1), pickled_call=b"all"),
        CallWorkers(round=3, call_id=2, ranks=(1,), pickled_call=b"one"),
        CallWorkers(round=2, call_id=3, ranks=(0,), pickled_call=b"of a round that is over"),
    ]
    assert one.staging.advance() == [
        (None, CallFunction(call_id=1, pickled_call=b"all")),
        (1, CallFunction(call_id=2, pickled_call=b"one")),
    ]
    one.send_frame(CallResult(call_id=2, pickled_value=b"value"), 1)
    assert one.staging.advance() == []
    assert one.hooks.results == [(3, 1, CallResult(call_id=2, pickled_value=b"value"))]


def test_a_failed_round_shuts_a_started_backend_down() -> None:
    one = GatedRound()
    one.to_training()
    one.staging.abandon_workers()
    assert one.hooks.ended_rounds == [3]
    one.staging.close()
    assert one.hooks.requested[-1] == ("on_shutdown", 3, 2)


def test_a_backend_that_never_started_is_not_shut_down() -> None:
    one = GatedRound()
    one.send_frame(AtGate(phase="setup"))
    one.staging.advance()
    one.staging.close()
    assert [hook for hook, _, _ in one.hooks.requested] == ["on_start"]
    assert one.hooks.ended_rounds == [3]
