"""Whether a backend could rent machines: everything it needs, looked at one by one.

A provisioner may have `examine(storage="")`, which yields a `Finding` for each thing it needs in
its account: all of them, whatever is wrong with the first. `storage` is the bucket that machines
would have to reach, where one was named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ProvisionPermissionError, SpotfitError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.api import Provisioner


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is needed: whether it is there, what was found, and how to mend it."""

    what: str
    well: bool
    found: str = ""
    do: str = ""
    seen: bool = True
    """Whether it could be looked at; what could not is not held to be wrong."""


class UnseenError(Exception):
    """What a check raises that cannot look: why not. It goes no further than to `look`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@contextmanager
def unseen_if_refused() -> Iterator[None]:
    """Around what a check asks: who may not ask has not looked, and nothing is held to be wrong."""
    try:
        yield
    except ProvisionPermissionError as refused:
        raise UnseenError(refused.what) from refused


def look(what: str, check: Callable[[], Any], *, do: str = "") -> Finding:
    """What the check gives, as text. What it raises is what is wrong, but for `UnseenError`."""
    try:
        found = check()
    except UnseenError as unseen:
        return Finding(what, well=True, found=unseen.why, do=do, seen=False)
    except SpotfitError as wrong:
        return Finding(what, well=False, found=wrong.what, do=wrong.do or do)
    except Exception as wrong:  # noqa: BLE001  # each client library has its own errors
        return Finding(what, well=False, found=f"{type(wrong).__name__}: {wrong}", do=do)
    return Finding(what, well=True, found="" if found is None else str(found))


def examine(provisioner: Provisioner, storage: str = "") -> Iterator[Finding]:
    """A plan for one worker, then whatever the backend itself wants to be sure of."""
    request = GroupRequest(Token("t-checkup"), 1, 1, run_name="checkup")
    planned = look("its options make a plan", lambda: _told(provisioner, request))
    yield planned
    own: Callable[[str], Iterator[Finding]] | None = getattr(provisioner, "examine", None)
    if planned.well and own is not None:
        yield from own(storage)


def _told(provisioner: Provisioner, request: GroupRequest) -> str:
    plan = provisioner.plan(request)
    return f"{plan.nodes} machine, {plan.slots} workers on each"
