"""Whose fault was it, and may we try again: three budgets, told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spotfit.core.errors import MachineError, SpotfitError, TransientStoreError
from spotfit.model.events import Blame, FitEnded, RankFailure, RoundClosed, Taken
from spotfit.model.spec import Limits
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Place, Round
from spotfit.policy.absence import away, taken_away

_IN_VAIN = "another try would end the same way"


class Fault(NamedTuple):
    """Whose fault a failure was, and whether another try would end the same way."""

    blame: Blame
    final: bool


def while_preparing(error: BaseException) -> Fault:
    """Why a worker could not be got ready to call the user's function.

    What a bucket or a machine fails at for a while is the platform's. What the user asked for or
    sent along is his, and no machine will judge it otherwise, unless the error itself says
    `may_pass`. What nobody expected is ours: not his to pay, nor better the next time.
    """
    match error:
        case TransientStoreError() | MachineError() | OSError() | MemoryError():
            return Fault(Blame.PLATFORM, final=False)
        case SpotfitError():
            return Fault(Blame.WORKER, final=not error.facts.get("may_pass", False))
        case Exception():
            return Fault(Blame.PLATFORM, final=True)
        case _:
            return Fault(Blame.WORKER, final=False)


def ends_the_same_way(error: BaseException) -> bool:
    """Whether the user's function would raise that again in every other try.

    Nobody knows of his own errors. Of ours those do that say so: their `may_pass` is False.
    """
    return isinstance(error, SpotfitError) and error.facts.get("may_pass") is False


def closing(view: View, watch: Watch, round_: Round) -> RoundClosed:
    """The entry that ends a round in which something failed, with the blame where it belongs.

    A lost machine outweighs the errors of its peers: they fail because it is gone, so their
    exceptions are its echo. So does a worker that died on a machine that announced its end, and a
    broken connection; whether its machine is lost with it is told later, by `NodeLost`.
    """
    failures = tuple(sorted(watch.failures.values(), key=_tells_most))
    leaving = [place for place in round_.places if place.agent in view.notices]
    if any(_broke_off(view, watch, place) for place in round_.places):
        return _broken_off(view, watch, round_, failures)
    if _part_of_leaving(failures, leaving):
        why = f"{_machines(leaving)} as announced"
        return RoundClosed(round_.number, Blame.PREEMPTION, why, failures, taken(leaving, view))
    if failures:
        blame, cause = _blamed(failures)
        return RoundClosed(round_.number, blame, _in_words(cause), failures)
    return RoundClosed(round_.number, Blame.SUCCESSION, "its hub is gone: another agent leads now")


def _broken_off(
    view: View, watch: Watch, round_: Round, failures: tuple[RankFailure, ...]
) -> RoundClosed:
    """Connections broke: with machines that were taken, that fell silent, or that may be back."""
    places = round_.places
    if lost := [place for place in places if taken_away(view, watch, place)]:
        told = _lost_ranks(lost, "is gone", failures)
        gone = taken([one for one in places if one in lost or one.agent in view.notices], view)
        return RoundClosed(round_.number, Blame.PREEMPTION, _machines(lost), told, gone)
    if silent := [place for place in places if place.agent in view.outages]:
        told = _lost_ranks(silent, "runs, but its agent is not heard any more", failures)
        return RoundClosed(round_.number, Blame.PLATFORM, f"no agent on {_names(silent)}", told)
    missing = [place for place in places if away(view, watch, place)]
    broken = [place for place in places if _broke_off(view, watch, place)]
    told = _lost_ranks(missing, "is not connected any more", failures)
    why = f"the connection to {_names(broken)} broke"
    return RoundClosed(round_.number, Blame.NETWORK, why, told)


def in_vain(unable: RankFailure) -> FitEnded:
    """The end of a run one of whose machines can start no worker, and of which no other would."""
    blame, _ = _blamed((unable,))
    return FitEnded("failed", f"{_IN_VAIN}: {_in_words(unable)}", blame, (unable,))


def verdict(view: View) -> FitEnded | None:
    """The end of the run, if the last round broke its budget."""
    closed = view.last_closed
    assert view.spec is not None
    if closed is None or closed.blame not in (Blame.WORKER, Blame.PLATFORM, Blame.PREEMPTION):
        return None
    if closed.blame != Blame.PREEMPTION and any(failure.final for failure in closed.failures):
        return FitEnded("failed", f"{_IN_VAIN}: {closed.why}", closed.blame, closed.failures)
    allowed = _limit(view.spec.limits, closed.blame)
    failed = view.failures.get(closed.blame, 0)
    if allowed < 0 or failed <= allowed:
        return None
    why = f"failure {failed} of kind {closed.blame.value!r}, {allowed} allowed: {closed.why}"
    return FitEnded("failed", why, closed.blame, closed.failures, taken=closed.taken)


def taken(places: Sequence[Place], view: View, *, timed_out: bool = False) -> Taken:
    """These machines as reclaimed, with the earliest end that their notices told."""
    notices = [view.notices[place.agent] for place in places if place.agent in view.notices]
    deadlines = [notice.deadline_ms for notice in notices if notice.deadline_ms]
    nodes = {place.machine: tuple(place.ranks) for place in places}
    return Taken(nodes, min(deadlines, default=0), timed_out)


def _limit(limits: Limits, blame: Blame) -> int:
    return {
        Blame.WORKER: limits.worker,
        Blame.PLATFORM: limits.platform,
        Blame.PREEMPTION: limits.preemption,
    }[blame]


def _broke_off(view: View, watch: Watch, place: Place) -> bool:
    """Whether that place's connection broke in this round, back or not."""
    return place.agent in watch.broken or away(view, watch, place)


def _lost_ranks(
    places: list[Place], how: str, failures: tuple[RankFailure, ...]
) -> tuple[RankFailure, ...]:
    """These ranks as lost, and what else was told of others."""
    ranks = [rank for place in places for rank in place.ranks]
    lost = [RankFailure(r, "lost", f"The machine of rank {r} {how}.") for r in ranks]
    return (*lost, *(failure for failure in failures if failure.rank not in ranks))


def _tells_most(failure: RankFailure) -> tuple[bool, int]:
    """A process that died without a word is the cause; the others' broken connections its echo."""
    return (failure.kind == "raised", failure.rank)


def _part_of_leaving(failures: Sequence[RankFailure], leaving: list[Place]) -> bool:
    """A process that dies there was ended with its machine; an exception is the user's own, unless
    nobody else has one."""
    there = [failure for failure in failures if _on(leaving, failure.rank)]
    died = any(failure.kind != "raised" for failure in there)
    return died or (len(there) > 0 and len(there) == len(failures))


def _on(places: list[Place], rank: int) -> bool:
    return any(rank in place.ranks for place in places)


def _machines(places: list[Place]) -> str:
    return f"lost {len(places)} machine{'s' if len(places) > 1 else ''} ({_names(places)})"


def _names(places: list[Place]) -> str:
    return ", ".join(place.machine for place in places)


def _blamed(failures: tuple[RankFailure, ...]) -> tuple[Blame, RankFailure]:
    """Whom the round is charged to, and for what: what no try will change says most, then what is
    nobody's code."""
    decisive = next((one for one in failures if one.final), None)
    decisive = decisive or next((one for one in failures if _platform(one)), failures[0])
    return (Blame.PLATFORM if _platform(decisive) else Blame.WORKER), decisive


def _platform(failure: RankFailure) -> bool:
    return failure.blame is Blame.PLATFORM or failure.kind == "lost"


def _in_words(failure: RankFailure) -> str:
    return f"rank {failure.rank} {failure.kind}: {_gist(failure.told) or failure.kind}"


def _gist(told: str) -> str:
    """The last line that says what happened: what is indented belongs to the line before."""
    lines = told.strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith(" ")), "")[:200]
