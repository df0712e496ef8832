"""WorkerGroup and RemoteCalls: calls, results by rank, lost workers."""

from __future__ import annotations

import cloudpickle
import pytest

from spotfit.code.function_pickle import unpickle
from spotfit.core.errors import ConfigError, StaleWorkerGroupError
from spotfit.protocol.agent_sidecar import CallWorkers, WorkerCallResult
from spotfit.sidecar.worker_group import RemoteCalls, WorkerGroup

ROUND = 3


class Workers:
    """Fake workers that reply at once, or when the test says so."""

    def __init__(self, *, replies_at_once: bool = True) -> None:
        self.calls = RemoteCalls(self.send)
        self.group = WorkerGroup(self.calls, ROUND, 3, {"CPU": 2})
        self.sent: list[CallWorkers] = []
        self.replies_at_once = replies_at_once

    def send(self, send: CallWorkers) -> None:
        self.sent.append(send)
        for rank in send.ranks if self.replies_at_once else ():
            self.reply(send, rank)

    def reply(self, send: CallWorkers, rank: int) -> None:
        fn, args, kwargs = unpickle(send.pickled_call, description="call")
        value = fn(rank, *args, **kwargs)
        self.calls.resolve(
            WorkerCallResult(
                round=send.round,
                rank=rank,
                call_id=send.call_id,
                pickled_value=cloudpickle.dumps(value),
            )
        )

    def fail(self, rank: int, error: bytes) -> None:
        send = self.sent[-1]
        self.calls.resolve(
            WorkerCallResult(
                round=send.round,
                rank=rank,
                call_id=send.call_id,
                pickled_value=error,
                traceback_text="Traceback\nKeyError: 'x'",
            )
        )


def named(rank: int, name: str, end: str = "") -> str:
    return f"{name}{rank}{end}"


def test_execute_sends_one_message_and_returns_results_by_rank() -> None:
    workers = Workers()
    assert workers.group.execute(named, "w", end="!") == ["w0!", "w1!", "w2!"]
    assert [send.ranks for send in workers.sent] == [(0, 1, 2)]
    assert workers.sent[0].round == ROUND


def test_execute_single_calls_one_rank() -> None:
    workers = Workers()
    assert workers.group.execute_single(2, named, "w") == "w2"
    assert [send.ranks for send in workers.sent] == [(2,)]


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range_is_rejected(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"Rank {rank} is out of range: the group has 3 workers"):
        Workers().group.execute_single(rank, named, "w")


def test_futures_complete_in_any_order() -> None:
    workers = Workers(replies_at_once=False)
    futures = workers.group.execute_async(named, "w")
    other = workers.group.execute_single_async(0, named, "v")
    for rank in (2, 0, 1):
        assert not futures[rank].done()
        workers.reply(workers.sent[0], rank)
    assert [future.result(0) for future in futures] == ["w0", "w1", "w2"]
    assert not other.done()


def test_an_exception_of_a_worker_is_raised_with_its_rank() -> None:
    workers = Workers(replies_at_once=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.fail(1, cloudpickle.dumps(KeyError("x")))
    error = future.exception(0)
    assert isinstance(error, KeyError)
    assert error.__notes__ == ["raised on rank 1:\nTraceback\nKeyError: 'x'"]


def test_an_exception_that_cannot_be_pickled_is_raised_as_runtime_error() -> None:
    workers = Workers(replies_at_once=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.fail(1, b"")
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        future.result(0)


def test_a_result_that_cannot_be_unpickled_fails_only_its_call() -> None:
    workers = Workers(replies_at_once=False)
    future = workers.group.execute_single_async(1, named, "w")
    send = workers.sent[0]
    workers.calls.resolve(
        WorkerCallResult(round=send.round, rank=1, call_id=send.call_id, pickled_value=b"nonsense")
    )
    assert future.exception(0) is not None
    workers.calls.resolve(
        WorkerCallResult(round=send.round, rank=1, call_id=send.call_id, pickled_value=b"")
    )  # a duplicate


def test_calls_of_a_closed_round_fail() -> None:
    workers = Workers(replies_at_once=False)
    future = workers.group.execute_single_async(1, named, "w")
    workers.calls.close_round(ROUND)
    with pytest.raises(StaleWorkerGroupError, match="Round 3 has ended"):
        future.result(0)
    with pytest.raises(StaleWorkerGroupError):
        workers.group.execute(named, "w")
    later = WorkerGroup(workers.calls, ROUND + 1, 1, {})
    assert not later.execute_single_async(0, named, "w").done()


def test_a_group_has_a_size_and_resources() -> None:
    group = Workers().group
    assert (len(group), group.get_resources_per_worker()) == (3, {"CPU": 2})
