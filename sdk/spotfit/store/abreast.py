"""Several requests at a time, where each waits for the bucket and not for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")

AT_ONCE = 16
_ONE_BY_ONE = 2
"""So few are not worth a thread."""


def abreast(ask: Callable[[Thing], Answer], things: Iterable[Thing]) -> list[Answer]:
    """What `ask` answers for each, in their order; it is asked `AT_ONCE` times at a time.

    Where it raises, so does this, once those under way have ended; no others are begun then. `ask`
    itself asks for one thing after the other: nobody is to ask for more at a time.
    """
    found = list(things)
    if len(found) <= _ONE_BY_ONE:
        return [ask(thing) for thing in found]
    with ThreadPoolExecutor(min(AT_ONCE, len(found)), "spotfit-abreast") as askers:
        return list(askers.map(ask, found))
