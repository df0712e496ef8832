"""Handles of asynchronous collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from spotfit.core.errors import SpotfitError


class HorovodInternalError(SpotfitError, RuntimeError):
    """A collective failed, for example because another rank has ended."""


class CollectiveHandle:
    """A collective that was started; `wait` returns its result."""

    def __init__(self, works: Iterable[Any], finish: Callable[[], Any]) -> None:
        """`works` are those of torch.distributed; `finish` computes the result once they ended."""
        self._works = tuple(works)
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def is_completed(self) -> bool:
        """Return whether `wait` returns without waiting for other ranks."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Wait until the collective has ended, and return its result; repeatable.

        On a GPU only the current stream waits. Raises `HorovodInternalError` if the collective
        failed.
        """
        if self._finish is None:
            return self._result
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise HorovodInternalError(
                f"A collective failed: {error}", do="See the output of the other ranks."
            ) from error
        self._result, self._finish, self._works = self._finish(), None, ()
        return self._result


def synchronize(handle: CollectiveHandle) -> Any:
    """Wait for a collective and return its result: a tensor, or several.

    On a GPU only the current stream waits. Raises `HorovodInternalError` if the collective failed.
    """
    return handle.wait()


def poll(handle: CollectiveHandle) -> bool:
    """Return whether `synchronize` will return without waiting for other ranks."""
    return handle.is_completed()
