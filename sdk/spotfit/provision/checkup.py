"""Whether a backend could rent machines: everything it needs, looked at one by one.

A provisioner may have `examine(storage="")`, which yields a `Finding` for each thing it needs in
its account: all of them, whatever is wrong with the first. `storage` is the bucket that machines
would have to reach, where one was named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import SpotfitError
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


@dataclass(frozen=True, slots=True)
class Unseen:
    """What a check gives that may not look: why not."""

    why: str


def look(what: str, check: Callable[[], Any], *, do: str = "") -> Finding:
    """What the check gives, as text or `Unseen`; what it raises is what is wrong."""
    try:
        found = check()
    except SpotfitError as wrong:
        return Finding(what, well=False, found=wrong.what, do=wrong.do or do)
    except Exception as wrong:  # noqa: BLE001  # each client library has its own errors
        return Finding(what, well=False, found=f"{type(wrong).__name__}: {wrong}", do=do)
    if isinstance(found, Unseen):
        return Finding(what, well=True, found=found.why, do=do, seen=False)
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
