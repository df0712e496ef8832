"""How much of a group's time on a recorded spot market becomes training, by how it saves.

Virtual time, and the production policies: `policy.cadence` says when to save, `policy.drain` what
to save at a notice. What a save costs is given, as it would be measured. The whole group is lost
with its first machine, and begins again from the bucket: recovery from memory is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_

from msgspec.structs import replace

from spotfit.model.cadence import BRACKETS_S, Cadence, Costs, Odds, bracket
from spotfit.policy.cadence import Moment, Save, judge, outlook
from spotfit.policy.drain import LastChance, SaveLast, TrainOn, save_at_notice
from spotfit_localsim.dice import Stream
from spotfit_localsim.traces import Trace


@dataclass(frozen=True, slots=True)
class Life:
    """One time that the whole group had its machines, until the first was reclaimed."""

    lasts_s: float
    announced: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What things take."""

    costs: Costs = field(default=Costs(stall_s=0.5, slowdown=0.3, commit_s=20.0))
    recovery_s: float = 60.0
    """From the machines being there to the first new step."""
    last_upload_s: float = 10.0
    """A last upload, with all the machine has."""
    step_s: float = 0.5
    notice_s: float = 120.0
    honoured: float = 0.0
    """The share of ends that are announced so long before."""


def lives(
    trace: Trace, machines: int, *, honoured: float = 0.0, stream: Stream
) -> tuple[Life, ...]:
    """The times at which so many machines were there, each change at some time inside its tick.

    That share of them is announced. The last is left out where nobody saw its end.
    """
    began: float | None = None
    found: list[Life] = []
    for at_s, count in _jittered(trace, stream):
        if count >= machines and began is None:
            began = at_s
        elif count < machines and began is not None:
            found.append(Life(at_s - began, announced=stream.chance(honoured)))
            began = None
    return tuple(life for life in found if life.lasts_s > 0)


def _jittered(trace: Trace, stream: Stream) -> Iterator[tuple[float, int]]:
    for at_s, count in trace.steps:
        yield max(0.0, at_s - trace.tick_s * stream.random()), count


class Group:
    """One life of a group, and the work it does: seconds of undisturbed training."""

    def __init__(self, life: Life, setting: Setting) -> None:
        self.life = life
        self.setting = setting
        self.now = setting.recovery_s
        self.work = 0.0
        self.saved_at = self.now
        self.saved_work = 0.0
        self.committed = 0.0
        """Work that is safe in the bucket."""
        self.commits_at: float | None = None
        """When the save on its way is committed."""

    def train(self, until: float) -> None:
        """Go on until then; a save on its way is committed when its time has come."""
        until = min(until, self.life.lasts_s)
        if self.commits_at is not None and self.commits_at <= until:
            self._work_until(self.commits_at)
            self.committed, self.commits_at = self.saved_work, None
        self._work_until(until)

    def save(self, takes_s: float) -> None:
        """Stand still for a snapshot; it is committed so long after it, or after the one before."""
        self.saved_at, self.saved_work = self.now, self.work
        self.now = min(self.now + self.setting.costs.stall_s, self.life.lasts_s)
        self.commits_at = max(self.now, self.commits_at or 0.0) + takes_s

    def _work_until(self, until: float) -> None:
        lasts_s = max(0.0, until - self.now)
        slowed = self.setting.costs.slowdown if self.commits_at is not None else 0.0
        self.work += lasts_s * (1 - slowed)
        self.now += lasts_s


Pace = Callable[[Group, float], None]
"""Lets a group train until then, and save as it sees fit."""


def every(interval_s: float) -> Pace:
    """Save every so often, but never before the last save is committed."""
    return by_age((interval_s,) * (len(BRACKETS_S) + 1))


def by_age(intervals_s: Sequence[float]) -> Pace:
    """The same, with an interval for each bracket of the group's age at the last save."""

    def pace(group: Group, until: float) -> None:
        costs = group.setting.costs
        while (due := group.saved_at + _apart_s(group)) < until:
            group.train(due)
            group.save(costs.commit_s)
        group.train(until)

    def _apart_s(group: Group) -> float:
        costs = group.setting.costs
        return max(intervals_s[bracket(group.saved_at)], costs.stall_s + costs.commit_s)

    return pace


@dataclass
class Ours:
    """The production policy. It knows what the lives so far have taught it, and nothing ahead."""

    odds: Odds
    cadence: Cadence = field(default=Cadence(auto=True))
    measured: bool = False
    """Whether anything was ever saved: until then nobody knows what that costs."""

    def __call__(self, group: Group, until: float) -> None:
        while group.now < until:
            due = self._next_look(group)
            if due <= group.now:
                group.save(group.setting.costs.commit_s)
                self.measured = True
            else:
                group.train(min(due, until))

    def learn(self, life: Life) -> None:
        """After its end."""
        endings = self.odds.endings.with_end(life.lasts_s, saved=life.announced)
        self.odds = replace(self.odds, endings=endings)

    def _next_look(self, group: Group) -> float:
        """When a save may be due; not later than now if one is."""
        if group.commits_at is not None:
            return group.commits_at
        moment = Moment(group.now, step=1, saved_at=group.saved_at, saved_step=0)
        ahead = outlook(self.odds, lived_s=group.now, last_save_s=group.setting.last_upload_s)
        costs = group.setting.costs if self.measured else None
        verdict = judge(self.cadence, moment, costs=costs, ahead=ahead)
        if isinstance(verdict, Save):
            return group.now
        return max(verdict.until, group.now + group.setting.step_s)


def live(life: Life, setting: Setting, pace: Pace) -> Group:
    """From the first machine to the end of that life."""
    group = Group(life, setting)
    if life.lasts_s > setting.recovery_s:
        pace(group, life.lasts_s - (setting.notice_s if life.announced else 0.0))
        if life.announced:
            _drain(group)
        group.train(life.lasts_s)
    return group


def _drain(group: Group) -> None:
    """What is done after the notice, by the production policy."""
    while group.now < group.life.lasts_s:
        verdict = save_at_notice(_chance(group))
        if isinstance(verdict, TrainOn):
            group.train(group.now + verdict.for_s)
        elif isinstance(verdict, SaveLast):
            group.train(group.now + group.setting.step_s)
            group.save(group.setting.last_upload_s)
        else:
            return


def _chance(group: Group) -> LastChance:
    setting = group.setting
    return LastChance(
        left_s=group.life.lasts_s - group.now,
        unsaved_s=group.now - group.saved_at,
        step_s=setting.step_s,
        costs=setting.costs,
        size_bytes=2**30,
        bucket_bytes_per_s=2**30 / setting.last_upload_s,
        in_flight_s=None if group.commits_at is None else group.commits_at - group.now,
    )


def goodput(all_lives: Sequence[Life], setting: Setting, pace: Pace) -> float:
    """The share of the time that became work which outlived its group.

    Each life is lived both ways, announced and not, and counts for each by `setting.honoured`: a
    handful of surprises more or less would tell nothing of who saves how. What is learned of it is
    what it was.
    """
    kept_s = 0.0
    for life in all_lives:
        kept_s += sum(
            share * live(with_(life, announced=announced), setting, pace).committed
            for announced, share in ((True, setting.honoured), (False, 1 - setting.honoured))
            if share > 0
        )
        if isinstance(pace, Ours):
            pace.learn(life)
    return kept_s / _time_s(all_lives)


def clairvoyant(all_lives: Sequence[Life], setting: Setting) -> float:
    """What nobody can surpass: each life saved once, just in time for its end."""
    lost_s = setting.recovery_s + setting.last_upload_s
    return sum(max(0.0, life.lasts_s - lost_s) for life in all_lives) / _time_s(all_lives)


def _time_s(all_lives: Sequence[Life]) -> float:
    return sum(life.lasts_s for life in all_lives)
