"""The workers of one attempt, as the hooks of a backend call them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from spotfit.core.errors import ConfigError, WorkersGoneError
from spotfit.model.hooks import Ask, Told
from spotfit.ship.function import unpickled
from spotfit.worker.calls import packed

Value = TypeVar("Value")


class WorkerGroup:
    """Calls functions on workers: before the training function in its thread, later beside it.

    Functions, arguments and what they return are pickled. What a call raises on a worker is raised
    here. New for every attempt; once that is over, calls raise `WorkersGoneError`.
    """

    def __init__(
        self, asking: Asking, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        self._asking = asking
        self._round = round_number
        self._world_size = world_size
        self._resources = dict(resources)

    def execute(self, fn: Callable[..., Value], *args: Any, **kwargs: Any) -> list[Value]:
        """Call `fn` on all workers, and wait; what it returned, by rank."""
        return [future.result() for future in self.execute_async(fn, *args, **kwargs)]

    def execute_async(
        self, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> list[Future[Value]]:
        """Call `fn` on all workers; by rank a future, whose `result()` waits for it."""
        return self._asking.ask(self._round, range(self._world_size), (fn, args, kwargs))

    def execute_single(
        self, rank: int, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> Value:
        """Call `fn` on the worker of that rank, and wait for what it returns."""
        return self.execute_single_async(rank, fn, *args, **kwargs).result()

    def execute_single_async(
        self, rank: int, fn: Callable[..., Value], *args: Any, **kwargs: Any
    ) -> Future[Value]:
        """Call `fn` on the worker of that rank."""
        if not 0 <= rank < self._world_size:
            raise ConfigError(
                f"There is no worker of rank {rank} among {self._world_size}.",
                do="Ranks count from 0; len(worker_group) tells how many there are.",
            )
        return self._asking.ask(self._round, (rank,), (fn, args, kwargs))[0]

    def get_resources_per_worker(self) -> dict[str, float]:
        """What each worker has, as its scaling config says."""
        return dict(self._resources)

    def __len__(self) -> int:
        return self._world_size


class Asking:
    """Calls that are under way, whatever thread made them."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[tuple[int, int], tuple[int, Future[Any]]] = {}
        """By call and rank: the round, and who waits."""
        self._over: set[int] = set()

    def ask(
        self, round_number: int, ranks: Sequence[int], call: tuple[Any, ...]
    ) -> list[Future[Any]]:
        """Have that call made by each rank; a future each. Raises `ShippingError`."""
        body = packed(call, what="call")
        number = next(self._numbers)
        futures: list[Future[Any]] = [Future() for _ in ranks]
        with self._lock:
            if round_number in self._over:
                raise _gone(round_number)
            for rank, future in zip(ranks, futures, strict=True):
                self._open[number, rank] = round_number, future
        self._send(Ask(round_number, number, tuple(ranks), body))
        return futures

    def told(self, told: Told) -> None:
        """A worker has answered."""
        with self._lock:
            _, future = self._open.pop((told.call, told.rank), (0, None))
        if future is not None:
            _resolve(future, told)

    def over(self, round_number: int) -> None:
        """No worker of that round answers any more."""
        with self._lock:
            self._over.add(round_number)
            gone = [key for key, (number, _) in self._open.items() if number == round_number]
            futures = [self._open.pop(key)[1] for key in gone]
        for future in futures:
            future.set_exception(_gone(round_number))

    def is_over(self, round_number: int) -> bool:
        """Whether nobody of that round can be called any more."""
        return round_number in self._over


def _resolve(future: Future[Any], told: Told) -> None:
    try:
        value = unpickled(told.value, what="answer") if told.value else None
    except Exception as unreadable:  # noqa: BLE001 - the user's own classes may raise anything
        future.set_exception(unreadable)
        return
    if told.raised is None:
        future.set_result(value)
        return
    error = value if isinstance(value, BaseException) else RuntimeError(told.raised)
    error.add_note(f"raised in the worker of rank {told.rank}:\n{told.raised}")
    future.set_exception(error)


def _gone(round_number: int) -> WorkersGoneError:
    return WorkersGoneError(
        f"Attempt {round_number} is over: its workers cannot be called any more.",
        do="Do on a worker what must be done there before its function ends; its process is gone.",
    )
