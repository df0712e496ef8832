"""Whose fault was it, and may we try again: three budgets, told apart."""

from __future__ import annotations

from spotfit.model.events import Blame, FitEnded, RankFailure, RoundClosed
from spotfit.model.spec import Limits
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Place, Round


def closing(view: View, watch: Watch, round_: Round) -> RoundClosed:
    """The entry that ends a round in which something failed, with the blame where it belongs.

    A lost machine outweighs the errors of its peers: they fail because it is gone, so their
    exceptions are its echo.
    """
    lost = [place for place in round_.places if _is_lost(view, watch, place)]
    failures = tuple(sorted(watch.failures.values(), key=_tells_most))
    if lost:
        told = tuple(_lost_rank(rank) for place in lost for rank in place.ranks)
        return RoundClosed(
            round_.number, Blame.PREEMPTION, _machines(lost), told + _raised(failures, told)
        )
    broken = [place for place in round_.places if place.agent in watch.broken]
    if broken:
        why = f"the connection to {broken[0].token}/{broken[0].node} broke"
        return RoundClosed(round_.number, Blame.NETWORK, why, failures)
    leaving = [place for place in round_.places if place.agent in view.notices]
    if failures and leaving and all(_on(leaving, failure.rank) for failure in failures):
        why = f"{_machines(leaving)} as announced"
        return RoundClosed(round_.number, Blame.PREEMPTION, why, failures)
    if any(failure.kind == "lost" for failure in failures):
        return RoundClosed(round_.number, Blame.PLATFORM, _first_words(failures), failures)
    if failures:
        return RoundClosed(round_.number, Blame.WORKER, _first_words(failures), failures)
    return RoundClosed(round_.number, Blame.SUCCESSION, "its hub is gone: another agent leads now")


def verdict(view: View) -> FitEnded | None:
    """The end of the run, if the last round broke its budget."""
    closed = view.last_closed
    assert view.spec is not None
    if closed is None or closed.blame not in (Blame.WORKER, Blame.PLATFORM, Blame.PREEMPTION):
        return None
    allowed = _limit(view.spec.limits, closed.blame)
    failed = view.failures.get(closed.blame, 0)
    if allowed < 0 or failed <= allowed:
        return None
    why = f"failure {failed} of kind {closed.blame.value!r}, {allowed} allowed: {closed.why}"
    return FitEnded("failed", why, closed.blame, closed.failures)


def _limit(limits: Limits, blame: Blame) -> int:
    return {
        Blame.WORKER: limits.worker,
        Blame.PLATFORM: limits.platform,
        Blame.PREEMPTION: limits.preemption,
    }[blame]


def _is_lost(view: View, watch: Watch, place: Place) -> bool:
    former_leader = view.leader is not None and view.leader.lost == place.agent
    return place.agent in view.lost_agents or place.agent in watch.gone or former_leader


def _lost_rank(rank: int) -> RankFailure:
    return RankFailure(rank, "lost", f"The machine of rank {rank} is gone.")


def _tells_most(failure: RankFailure) -> tuple[bool, int]:
    """A process that died without a word is the cause; the others' broken connections its echo."""
    return (failure.kind == "raised", failure.rank)


def _raised(
    failures: tuple[RankFailure, ...], told: tuple[RankFailure, ...]
) -> tuple[RankFailure, ...]:
    ranks = {failure.rank for failure in told}
    return tuple(failure for failure in failures if failure.rank not in ranks)


def _on(places: list[Place], rank: int) -> bool:
    return any(rank in place.ranks for place in places)


def _machines(places: list[Place]) -> str:
    names = ", ".join(f"{place.token}/{place.node}" for place in places)
    return f"lost {len(places)} machine{'s' if len(places) > 1 else ''} ({names})"


def _first_words(failures: tuple[RankFailure, ...]) -> str:
    first = failures[0]
    last_line = first.told.strip().splitlines()[-1] if first.told.strip() else first.kind
    return f"rank {first.rank} {first.kind}: {last_line[:200]}"
