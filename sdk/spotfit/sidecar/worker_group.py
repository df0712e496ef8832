"""`WorkerGroup`: how the hooks of a backend call functions on the workers of one round."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from spotfit.code.function_pickle import unpickle
from spotfit.core.errors import ConfigError, StaleWorkerGroupError
from spotfit.protocol.agent_sidecar import CallWorkers, WorkerCallResult
from spotfit.worker.agent_connection import pickle_payload

Value = TypeVar("Value")


class WorkerGroup:
    """The workers of one round; a hook of the next round receives another one.

    Before the training function starts, calls run in a worker's main thread; afterwards they run in
    a thread beside it. Functions, arguments and results are pickled. An exception on a worker is
    raised to the caller. Once the round has ended, calls raise `StaleWorkerGroupError`.
    """

    def __init__(
        self, calls: RemoteCalls, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        self._calls = calls
        self._round = round_number
        self._world_size = world_size
        self._resources = dict(resources)

    def execute(self, fn: Callable[..., Value], *args: Any, **kwargs: Any) -> list[Value]:
        """Call `fn` on all workers, wait, and return the results by rank.

        Waits without a time limit. Raises the exception of the lowest rank on which `fn` raised,
        `ShippingError` if the call or a result cannot be pickled or is too large, and
        `StaleWorkerGroupError` if the round ends.
        """
        return [future.result() for future in self.execute_async(fn, *args, **kwargs)]

    def execute_async(
        self, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> list[Future[Value]]:
        """Call `fn` on all workers; return futures of the results by rank, without waiting.

        This call raises `ShippingError` if `fn` or an argument cannot be pickled or is too large,
        and `StaleWorkerGroupError` if the round has ended. A future raises what `fn` raised,
        `ShippingError` if its result cannot be pickled or is too large, or `StaleWorkerGroupError`
        if the round ends first.
        """
        return self._calls.submit(self._round, range(self._world_size), (fn, args, kwargs))

    def execute_single(
        self, rank: int, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> Value:
        """Call `fn` on the worker with that global rank, wait, and return its result.

        Raises the exception of `fn`, `ConfigError` for a rank out of range, and otherwise as
        `execute`.
        """
        return self.execute_single_async(rank, fn, *args, **kwargs).result()

    def execute_single_async(
        self, rank: int, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> Future[Value]:
        """Call `fn` on the worker with that global rank; return a future, without waiting.

        Raises `ConfigError` for a rank out of range, and otherwise as `execute_async`.
        """
        if not 0 <= rank < self._world_size:
            raise ConfigError(
                f"Rank {rank} is out of range: the group has {self._world_size} workers.",
                do=f"Pass a rank from 0 to {self._world_size - 1} (len(worker_group) - 1).",
            )
        return self._calls.submit(self._round, (rank,), (fn, args, kwargs))[0]

    def get_resources_per_worker(self) -> dict[str, float]:
        """Return a copy of the resources of one worker, as in the scaling config: `{"GPU": 1}`."""
        return dict(self._resources)

    def __len__(self) -> int:
        return self._world_size


class RemoteCalls:
    """The pending calls of a hooks process. One thread submits them, another completes them.

    `send` passes a call to the agent. All methods are thread-safe.
    """

    def __init__(self, send: Callable[[CallWorkers], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._call_ids = itertools.count()
        self._pending: dict[tuple[int, int], tuple[int, Future[Any]]] = {}
        """Round and future by call id and rank."""
        self._closed_rounds: set[int] = set()

    def submit(
        self, round_number: int, ranks: Sequence[int], call: tuple[Any, ...]
    ) -> list[Future[Any]]:
        """Send a call (function, args, kwargs) to workers; return a future per rank, in this order.

        Does not wait for results. Raises `ShippingError` if the call cannot be pickled or is too
        large, and `StaleWorkerGroupError` if the round has ended. A future raises what the function
        raised.
        """
        # Pickled once for all ranks, before the lock: it may take long and may raise.
        body = pickle_payload(call, what="call")
        call_id = next(self._call_ids)
        futures: list[Future[Any]] = [Future() for _ in ranks]
        # One lock: `close_round` must either find these futures or make this call fail.
        with self._lock:
            if round_number in self._closed_rounds:
                raise _make_workers_gone_error(round_number)
            for rank, future in zip(ranks, futures, strict=True):
                self._pending[call_id, rank] = round_number, future
        # Registered before: the reading thread may receive a result before `send` returns.
        self._send(
            CallWorkers(round=round_number, call_id=call_id, ranks=tuple(ranks), pickled_call=body)
        )
        return futures

    def resolve(self, call_result: WorkerCallResult) -> None:
        """Complete the future of a call with its result or exception, which is unpickled here.

        Called by the thread that reads messages of the agent. Ignored for calls of a closed round.
        """
        with self._lock:
            _, future = self._pending.pop((call_result.call_id, call_result.rank), (0, None))
        if future is None:  # its round was closed before the result arrived
            return
        # Outside the lock: unpickling runs user code, and callbacks of the future may submit calls.
        pickled, traceback_text = call_result.pickled_value, call_result.traceback_text
        try:
            value = unpickle(pickled, description="result of a worker call") if pickled else None
        except Exception as error:  # noqa: BLE001 - unpickling the user's classes may raise anything
            future.set_exception(error)
            return
        if traceback_text is None:
            future.set_result(value)
            return
        # An exception that could not be pickled on the worker is represented by its traceback.
        raised = value if isinstance(value, BaseException) else RuntimeError(traceback_text)
        raised.add_note(f"raised on rank {call_result.rank}:\n{traceback_text}")
        future.set_exception(raised)

    def close_round(self, round_number: int) -> None:
        """Fail the calls of this round, because its workers are killed or gone.

        The futures of its pending calls raise `StaleWorkerGroupError`, and so does `submit` for
        this round from now on. Other rounds are unaffected. A repeated call is harmless.
        """
        with self._lock:
            self._closed_rounds.add(round_number)
            pending = [
                key for key, (of_round, _) in self._pending.items() if of_round == round_number
            ]
            futures = [self._pending.pop(key)[1] for key in pending]
        # Outside the lock: a callback of the future may submit another call.
        for future in futures:
            future.set_exception(_make_workers_gone_error(round_number))

    def is_round_closed(self, round_number: int) -> bool:
        """Whether `close_round` was called for that round: its workers are killed or gone."""
        return round_number in self._closed_rounds


def _make_workers_gone_error(round_number: int) -> StaleWorkerGroupError:
    return StaleWorkerGroupError(
        f"Round {round_number} has ended: its worker processes have exited and cannot be called.",
        do="Call functions on workers before the round ends, for example in on_training_start.",
    )
