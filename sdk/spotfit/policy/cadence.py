"""When the next checkpoint is to be saved: often enough for what may be lost, and no oftener.

Facts go in, a verdict and its reason come out. Who decides, and how all ranks come to save the same
step, stands in docs/guides/cadence.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from spotfit.core.units import told_seconds
from spotfit.model.cadence import Cadence, Costs, Odds, bracket

FIRST_S = 30.0
"""While nothing is measured: the first save comes after so long, and measures."""

LOOK_S = 2.0
"""All ranks look together whether it is time at least this often, where steps are no longer."""
_LEAST_LOOK_S = 0.25
"""Oftener they never do."""
_LOOKS_SHARE = 0.001
"""The share of the time that looks may take, as rank 0 sees them. Where agents share the cores with
the training they were measured to cost it three times as much."""

_PRIOR_ENDS = 1.0
"""How many ends of groups the backend's word counts for."""
_LIKE_ALL = 2.0
"""How many ends an age counts for as having been ended like groups of all ages."""
_PRIOR_NOTICES = 2.0
"""How many ends the backend's word on notices counts for."""
_HONOURED = 0.9
"""The share of ends that a backend which gives notice is taken to announce."""


class Outlook(NamedTuple):
    """What is to be expected of a group."""

    life_s: float
    """How long it lives on, on average."""
    announced: float
    """The share of ends before which it can save."""


class Interval(NamedTuple):
    """How far apart saves are, from one's beginning to the next one's, and why."""

    every_s: float
    why: str


class Moment(msgspec.Struct, frozen=True):
    """Where the training stands, as rank 0 sees it after a step."""

    now: float
    step: int
    saved_at: float
    """When the last save of this round began, or else when its training did."""
    saved_step: int
    """The step of the last save of this round, or else the one its training began at."""
    in_flight: int = 0
    """Saves that have begun and are not committed."""
    room: bool = True
    """Whether another snapshot could be held beside those in flight."""
    epoch_ended: bool = False
    """Whether an epoch has ended since the last save."""
    advised: str = ""
    """Why a machine is said to be in danger, if that was said since the last save."""


class Save(NamedTuple):
    """Save now."""

    why: str


class Hold(NamedTuple):
    """Save nothing yet; not before `until`, unless the step or something else makes one due."""

    until: float
    why: str


def outlook(odds: Odds, *, lived_s: float, last_save_s: float = 0.0) -> Outlook:
    """How long a group lives on whose round was opened so long ago, and whether it can save then.

    `last_save_s` is what a save at a notice takes: a shorter notice is none.

    Lives are taken to end at a rate that depends on the age's bracket alone. Each rate has a gamma
    prior, and so has the rate over all ages, which that of a bracket leans on; a count of ends with
    a gamma prior has a gamma posterior, of which the mean is taken. The share of announced ends has
    a beta prior. The group's own age counts as time that was watched.
    """
    age_s = odds.age_s + lived_s
    known = odds.endings.watched(age_s)
    # Machines of one zone go in bulks: between going all together and each for itself.
    life_s = odds.market.life_s / math.sqrt(odds.machines)
    overall = (_PRIOR_ENDS + known.all_ended) / (_PRIOR_ENDS * life_s + sum(known.lived_s))
    here = bracket(age_s)
    rate = (_LIKE_ALL + known.ended[here]) / (_LIKE_ALL / overall + known.lived_s[here])
    in_time = odds.market.notice_s > last_save_s
    honoured = _PRIOR_NOTICES * _HONOURED if in_time else 0.0
    announced = (honoured + known.announced) / (_PRIOR_NOTICES + known.all_ended)
    return Outlook(1 / rate, announced)


def best_interval(costs: Costs, ahead: Outlook, *, max_overhead: float) -> Interval:
    """How often to save, so that saves and what is lost between them cost least together.

    Of a save that costs `c`, and ends that come as a surprise every `m` on average, it is the root
    of 2·c·m. The user's largest overhead may make it longer. Where a save is committed only after
    that, the next one begins at once.
    """
    surprised = max(1e-6, 1 - ahead.announced)
    root_s = math.sqrt(2 * costs.each_s * ahead.life_s / surprised)
    least_s = costs.each_s / max_overhead
    why = f"{_told_costs(costs)}; {_told_outlook(ahead)}"
    if least_s > max(root_s, costs.commit_s):
        return Interval(least_s, f"{why}; oftener would cost more than {max_overhead:.1%}")
    if root_s <= costs.stall_s + costs.commit_s:
        every_s = costs.stall_s + costs.commit_s
        return Interval(every_s, f"{why}; the next save begins when the last is committed")
    return Interval(root_s, why)


def judge(
    cadence: Cadence, moment: Moment, *, costs: Costs | None, ahead: Outlook | None
) -> Save | Hold:
    """Whether to save now. `costs` are None while nothing is measured; `ahead` may be without auto.

    A step that is saved already is never saved again, and nothing begins without room for it.
    """
    if moment.step <= moment.saved_step:
        return Hold(moment.now, "nothing was done since the last save")
    verdict = _in_danger(moment, costs) or _first_due(cadence, moment, costs, ahead)
    if isinstance(verdict, Save) and not moment.room:
        return Hold(moment.now, f"{moment.in_flight} saves are on their way, and hold all the room")
    return verdict


def _in_danger(moment: Moment, costs: Costs | None) -> Save | None:
    """Once for each such word, whatever the user has set; most that are in danger are left alone,
    so not before more could be lost than a save costs."""
    if not moment.advised or moment.in_flight:
        return None
    worth_it = costs is None or moment.now - moment.saved_at >= costs.each_s
    return Save(f"{moment.advised}; saving soon is wise") if worth_it else None


def _first_due(
    cadence: Cadence, moment: Moment, costs: Costs | None, ahead: Outlook | None
) -> Save | Hold:
    if cadence.epochs and moment.epoch_ended:
        return Save("an epoch has ended")
    if cadence.every_steps is not None and _steps_done(moment) >= cadence.every_steps:
        return Save(told_steps(_steps_done(moment)))
    if cadence.every_s is not None:
        why = f"every {told_seconds(cadence.every_s)}, as the user wants"
        return _after(moment, Interval(cadence.every_s, why))
    if cadence.auto:
        return _by_itself(cadence, moment, costs, ahead)
    return Hold(math.inf, "no time is set")


def _by_itself(
    cadence: Cadence, moment: Moment, costs: Costs | None, ahead: Outlook | None
) -> Save | Hold:
    if moment.in_flight:
        return Hold(moment.now, "the last save is still on its way")
    if costs is None or ahead is None:
        return _after(moment, Interval(FIRST_S, "the first save, to measure what one costs"))
    return _after(moment, best_interval(costs, ahead, max_overhead=cadence.max_overhead))


def _after(moment: Moment, interval: Interval) -> Save | Hold:
    due = moment.saved_at + interval.every_s
    why = f"one every {told_seconds(interval.every_s)}: {interval.why}"
    return Save(why) if moment.now >= due else Hold(due, why)


def look_every_s(look_s: float) -> float:
    """How far apart looks are, of which each takes `look_s`: as near as is cheap, for what they
    find can be a notice, and where steps become slower the next look is put off by that."""
    return min(LOOK_S, max(_LEAST_LOOK_S, look_s / _LOOKS_SHARE))


def steps_to_look(done: int, passed_s: float, *, within_s: float) -> int:
    """After how many steps to look again, when so many were `done` since the last look: `within_s`,
    if all goes on as fast as since then.

    But after half as many again at most. Between two slow steps all are fast, and nobody knows
    for how long.
    """
    steps = within_s * done / passed_s if passed_s > 0 else math.inf
    return max(1, int(min(steps, max(done + 1, 1.5 * done))))


def told_steps(done: int) -> str:
    """Why to save after so many steps, where that many are wanted."""
    return f"{done} step{'' if done == 1 else 's'} since the last save"


def _steps_done(moment: Moment) -> int:
    return moment.step - moment.saved_step


def _told_costs(costs: Costs) -> str:
    return (
        f"a save costs {told_seconds(costs.each_s)} ({told_seconds(costs.stall_s)} standing still, "
        f"{costs.slowdown:.0%} slower for {told_seconds(costs.commit_s)})"
    )


def _told_outlook(ahead: Outlook) -> str:
    told = f"the group is lost every {told_seconds(ahead.life_s)}"
    return f"{told}, {ahead.announced:.0%} of that announced in time" if ahead.announced else told
