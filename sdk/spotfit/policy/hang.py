"""Is a rank stuck, or just slow? And has a round begun at all?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spotfit.model.events import Blame, RankFailure, RoundClosed
from spotfit.model.spec import Vigil
from spotfit.model.view import View
from spotfit.model.watch import Progress, Watch
from spotfit.model.world import Round
from spotfit.policy.actions import Wait


class Hang(NamedTuple):
    """A round that does not get on."""

    ranks: tuple[int, ...]
    """Those it waits for, as far as that can be seen."""
    why: str
    ends_it: bool
    """Whether the round is to end for it, or only to be looked into."""


def suspected(
    vigil: Vigil, silent: Mapping[int, float], progress: Progress, now: float
) -> Hang | None:
    """A worker that answers no more; else a round in which nobody gets on, if that is looked for.

    `silent` tells by rank for how many seconds it has not answered. While workers start, or a
    checkpoint is on its way or being validated, a round may take its time.
    """
    if silent:
        longest_s = max(silent.values())
        why = f"{_named(silent)} not answered for {longest_s:.0f} s"
        return Hang(tuple(sorted(silent)), why, ends_it=True)
    begun = len(progress.running) == len(progress.steps)
    busy = progress.uploading or progress.validating
    if not vigil.hang_s or not begun or busy or now < looked_for_at(vigil, progress):
        return None
    ranks = _behind(progress)
    why = f"no rank has reported, met the others or saved for {now - progress.moved_at:.0f} s"
    if len(ranks) < len(_at_work(progress)):
        why += f"; {_named(ranks)} come less far than the others"
    return Hang(ranks, why, vigil.hang_ends)


def looked_for_at(vigil: Vigil, progress: Progress) -> float:
    """When a round that does not get on is next to be looked at."""
    return progress.moved_at + vigil.hang_s if vigil.hang_s else float("inf")


def not_begun(view: View, watch: Watch, round_: Round, now: float) -> RoundClosed | Wait | None:
    """A round whose workers take too long to come to the function is tried again.

    That is the platform's to pay: nothing of the user's function was called yet.
    """
    assert view.spec is not None
    patience_s = view.spec.vigil.start_s
    late = tuple(sorted(set(range(round_.world_size)) - watch.running))
    if not late or not patience_s:
        return None
    due = watch.turned_at + patience_s
    if now < due:
        return Wait(due, f"{len(late)} of {round_.world_size} workers have not begun")
    why = f"{_named(late)} not begun {patience_s:.0f} s after the round was opened"
    failures = tuple(_not_begun(rank, patience_s) for rank in late)
    return RoundClosed(round_.number, Blame.PLATFORM, why, failures)


def _not_begun(rank: int, patience_s: float) -> RankFailure:
    told = f"The worker of rank {rank} did not come to the training function in {patience_s:.0f} s."
    return RankFailure(rank, "timeout", told, blame=Blame.PLATFORM)


def _behind(progress: Progress) -> tuple[int, ...]:
    """Of those still at work, the ranks that came least far; all where they are even."""
    at_work = _at_work(progress)
    least = min((progress.steps[rank] for rank in at_work), default=0)
    return tuple(rank for rank in at_work if progress.steps[rank] == least)


def _at_work(progress: Progress) -> list[int]:
    return [rank for rank in range(len(progress.steps)) if rank not in progress.returned]


def _named(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    names = ", ".join(str(rank) for rank in listed)
    return f"rank {names} has" if len(listed) == 1 else f"ranks {names} have"
