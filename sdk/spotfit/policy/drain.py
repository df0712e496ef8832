"""What to do with the time between a notice and its machine's end, and when to change the size."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from spotfit.core.ids import AgentId
from spotfit.core.units import told_seconds
from spotfit.model.cadence import Costs
from spotfit.model.events import Blame, RoundClosed
from spotfit.model.vault import COPY_BYTES_PER_S
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Place, Round
from spotfit.policy.absence import away
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import expected_slots, is_last, lasting, usable_seats
from spotfit.policy.failure import closing, taken

UNKNOWN_NOTICE_S = 120.0
"""How long a machine is taken to stay whose notice names no time."""

_FRESH_S = 0.25
"""A commit is fresh for so long: little was done since."""
_LOOK_S = 1.0
"""How often, at most, a wait for a commit is looked at; the commit itself wakes the leader."""
_MARGIN_S = 2.0
"""So long before the machine goes the change is made all the same."""
_SLOWER = 0.2
"""By so much longer than measured a last upload may take."""
_ENTRY_S = 1.0
"""How long manifests and the commit take, after the upload."""
_EARLY = 0.01
"""The share of machines that are taken to go before the time they were told."""

_SAVED = "saved after the notice"

Way = Literal["bucket", "peer"]
"""Where the leaving machine's part of a snapshot is brought to."""


class LastChance(msgspec.Struct, frozen=True):
    """What a rank knows that is to save before its machine, or a peer's, goes."""

    left_s: float
    """Until the machine goes."""
    unsaved_s: float
    """How long was trained since the last snapshot that is committed or on its way."""
    step_s: float
    costs: Costs
    size_bytes: int
    """The largest part of a snapshot that a rank has to bring away."""
    bucket_bytes_per_s: float
    """How fast that was brought to the bucket so far, until the commit."""
    peer_bytes_per_s: float = 0.0
    """How fast it reaches a peer that stays; 0 where there is none."""
    in_flight_s: float | None = None
    """Until the save on its way is committed; None if none is."""
    room: bool = True
    """Whether another snapshot could be held beside those on their way: else the training would
    stand still until one of them is in the bucket."""
    replaced: bool = False
    """Whether the next round could open at once."""
    slow_step_s: float = 0.0
    """How long a step takes at worst, such as that with an evaluation."""


class SaveLast(NamedTuple):
    """Take a snapshot at the next step, and bring it there first."""

    way: Way
    why: str


class TrainOn(NamedTuple):
    """Go on training for so long, then ask again."""

    for_s: float
    why: str


class LetFinish(NamedTuple):
    """Take no other snapshot: nothing may slow down what is on its way."""

    why: str


class TooLate(NamedTuple):
    """Nothing that is not safe by now can be saved."""

    why: str


def leave_in_time(view: View, watch: Watch, round_: Round, now: float) -> RoundClosed | Wait | None:
    """Change over once the replacement stands ready and the group has saved; else at the deadline.

    Until then the group trains on: a notice alone costs nothing. What was saved before that is no
    occasion once it is committed, while neighbours can still get what was trained since. None
    without a notice.
    """
    leaving = [place for place in round_.places if place.agent in view.notices]
    if not leaving:
        return None
    deadline = min(_deadline(view, watch, place.agent) for place in leaving)
    if now >= deadline:
        why = "the time the notice gave is over"
        gone = taken(leaving, view, timed_out=True)
        return RoundClosed(round_.number, Blame.PREEMPTION, why, taken=gone)
    copied_at = _copied_at(view, watch, round_, leaving)
    saved = _saved_since(view, [place.agent for place in leaving])
    if not replaced(view, watch) or not (saved or copied_at is not None):
        return Wait(deadline, f"{len(leaving)} machines leave in {deadline - now:.0f} s")
    copied = copied_at is not None and now - copied_at <= _FRESH_S
    late = now >= deadline - _MARGIN_S
    committed = saved and _fresh(watch, now)
    if late or copied or (committed and not _is_overtaken(view, watch, round_, deadline - now)):
        return _changed_over(view, watch, round_, leaving)
    return Wait(deadline - _MARGIN_S, "replaced; changing over at the next save")


def _copied_at(view: View, watch: Watch, round_: Round, leaving: list[Place]) -> float | None:
    """When the last part of a state that was saved since the notices came from the machines that
    leave to those that stay; None while a part is missing. Those who stay have their own parts."""
    staying = {place.vault for place in round_.places if place not in leaving}
    copies = [watch.copies.get(rank) for place in leaving for rank in place.ranks]
    known = [copy for copy in copies if copy is not None and copy.vault in staying]
    if len(known) < len(copies) or len({copy.step for copy in known}) != 1:
        return None
    told = [copy.told_at for copy in known]
    return max(told) if min(told) > _noticed_at(watch, leaving) else None


def _noticed_at(watch: Watch, leaving: list[Place]) -> float:
    return max(watch.noticed_at.get(place.agent, watch.led_since) for place in leaving)


def _is_overtaken(view: View, watch: Watch, round_: Round, left_s: float) -> bool:
    """Whether those who stay are about to have a later state than the last one that was committed.

    It was taken before the workers knew that only their save is waited for, so they take another
    now. One of since then that is committed before it is copied is as good as there is.
    """
    assert view.spec is not None
    if watch.taken_at is None or watch.replaced_at is None or watch.taken_at >= watch.replaced_at:
        return False
    staying = [place for place in round_.places if place.agent not in view.notices]
    kept = bool(staying) and all(place.vault for place in staying)
    until_it_goes_s = left_s - view.spec.limits.preemption_grace_s
    return kept and _copying_s(view, round_) < until_it_goes_s - _MARGIN_S


def _copying_s(view: View, round_: Round) -> float:
    """How long it may take until a machine's part of a state lies with its neighbour."""
    latest = view.latest_checkpoint
    part_bytes = latest.size_bytes / len(round_.places) if latest is not None else 0.0
    return (1 + _SLOWER) * part_bytes / COPY_BYTES_PER_S + _ENTRY_S


def _changed_over(view: View, watch: Watch, round_: Round, leaving: list[Place]) -> RoundClosed:
    """Nothing is lost. An elastic group that goes on smaller has only changed its size."""
    assert view.spec is not None
    safe = _copied_at(view, watch, round_, leaving) is not None
    early = watch.taken_at is not None and watch.taken_at < _noticed_at(watch, leaving)
    why = "what was saved before the notice is committed" if early and not safe else _SAVED
    slots = _warm_slots(view, watch)
    if slots < view.spec.workers_max:
        why = f"{why}; {slots} workers go on"
        return RoundClosed(round_.number, Blame.RESIZE, why, safe=safe)
    gone = taken(leaving, view)
    return RoundClosed(
        round_.number, Blame.PREEMPTION, f"{why}, and replaced", taken=gone, safe=safe
    )


def save_at_notice(chance: LastChance) -> SaveLast | TrainOn | LetFinish | TooLate:
    """What to save in the time that is left, and when: as late as it is sure to be safe in time.

    At once where the replacement stands ready, for then the change waits for nothing else; and
    where so much is unsaved that the machine might go too early for it. Never where the training
    would have to wait for an earlier one.
    """
    way = _fitting_way(chance)
    if way is None and chance.in_flight_s is not None:
        return LetFinish(f"{_left(chance)}: enough for the save on its way at best, for no other")
    if way is None:
        return TooLate(f"{_left(chance)}: not enough for a save")
    if chance.replaced and chance.in_flight_s is not None:
        return _beside_another(chance)
    takes = f"a save to the {way} takes {told_seconds(_needed_s(chance, way))}"
    spare_s = chance.left_s - _needed_s(chance, way)
    if chance.replaced:
        return SaveLast(way, f"the replacement stands ready; {takes}")
    if not chance.room:
        return TrainOn(max(spare_s, chance.step_s), "all the room for saves is taken")
    if spare_s < chance.step_s + _until_next_s(chance):
        return SaveLast(way, f"{_left(chance)}; {takes}")
    if chance.in_flight_s is None and _EARLY * chance.unsaved_s > chance.costs.each_s:
        return SaveLast(way, f"{told_seconds(chance.unsaved_s)} of work should not wait; {takes}")
    return TrainOn(spare_s - _until_next_s(chance), f"{_left(chance)}; {takes}")


def _beside_another(chance: LastChance) -> SaveLast | LetFinish:
    """The replacement stands ready, and a save is on its way. Once more was trained since than is
    trained while another is taken and copied to a peer, that one is what the change waits for."""
    takes_s = _needed_s(chance, "peer")
    if chance.room and takes_s <= chance.left_s and takes_s < chance.unsaved_s:
        unsaved = f"{told_seconds(chance.unsaved_s)} of work were done since the last save"
        takes = f"one to the peer takes {told_seconds(takes_s)}"
        return SaveLast("peer", f"the replacement stands ready; {unsaved}, {takes}")
    return LetFinish("the replacement stands ready, and waits for the save on its way")


def _until_next_s(chance: LastChance) -> float:
    """How long it may take to come back here: a slow step, but for its sake nothing is saved that
    is less than it."""
    worth_it = chance.unsaved_s >= chance.slow_step_s
    return max(chance.step_s, chance.slow_step_s) if worth_it else chance.step_s


def _fitting_way(chance: LastChance) -> Way | None:
    """The bucket where there is time for it: what is there needs no machine any more."""
    if _needed_s(chance, "bucket") <= chance.left_s:
        return "bucket"
    return "peer" if _needed_s(chance, "peer") <= chance.left_s else None


def _needed_s(chance: LastChance, way: Way) -> float:
    """From now until another snapshot would be safe, after the one that is on its way."""
    speed = chance.bucket_bytes_per_s if way == "bucket" else chance.peer_bytes_per_s
    if speed <= 0:
        return float("inf")
    moving_s = (1 + _SLOWER) * chance.size_bytes / speed
    waiting_s = (chance.in_flight_s or 0.0) if way == "bucket" else 0.0
    return waiting_s + chance.step_s + chance.costs.stall_s + moving_s + _ENTRY_S


def _left(chance: LastChance) -> str:
    return f"{told_seconds(max(0.0, chance.left_s))} are left"


def may_outlive(view: View, place: Place) -> bool:
    """Whether a round may go on for a while when the machine of that place is gone: it was
    announced, and the user wants those who stay to save what they can."""
    assert view.spec is not None
    wanted = view.spec.relax_collectives or view.spec.limits.preemption_grace_s > 0
    return wanted and place.agent in view.notices and 0 not in place.ranks


def last_words(view: View, watch: Watch, round_: Round, now: float) -> RoundClosed | Wait | None:
    """When a machine has gone as announced: let those who stay save, but not for ever.

    They may finish a checkpoint they can finish; with relaxed collectives they may begin one.
    None where no machine has gone.
    """
    assert view.spec is not None
    lost = [place for place in round_.places if away(view, watch, place)]
    if not lost:
        return None
    agents = [place.agent for place in lost if place.agent in view.notices]
    until = min((_deadline(view, watch, agent) for agent in agents), default=now)
    gone = {rank for place in lost for rank in place.ranks}
    finishing = bool(watch.saving) and gone.isdisjoint(watch.saving)
    beginning = view.spec.relax_collectives and not _saved_since(view, agents)
    if now < until and (finishing or beginning):
        return Wait(until, f"those who stay save; ranks {sorted(gone)} are gone")
    return closing(view, watch, round_)


def renew(view: View, watch: Watch, round_: Round, now: float) -> RoundClosed | Wait | None:
    """Leave machines that their backend would not bring back once more, just after a commit, when
    others stand ready: then nothing is lost. None while there is nothing to change."""
    last = [place for place in round_.places if is_last(watch, place.token, place.node)]
    fresh = sum(seat.member.slots for seat in lasting(view, watch) if seat.warm)
    if not last or fresh < round_.world_size:
        return None
    why = f"{_told_machines(last)} would not be brought back once more"
    if not (_fresh(watch, now) and view.latest_committed_slot > view.round_slot):
        return Wait(now + _LOOK_S, f"{why}; changing over at the next commit")
    return RoundClosed(round_.number, Blame.RESIZE, f"{why}, and others stand ready")


def _told_machines(places: list[Place]) -> str:
    return ", ".join(place.machine for place in places)


def regroup(view: View, watch: Watch, round_: Round, now: float) -> RoundClosed | Wait | None:
    """Grow an elastic group when machines are there, just after a commit: then nothing is lost."""
    assert view.spec is not None
    spec = view.spec
    if not spec.elastic or round_.world_size >= spec.workers_max:
        return None
    here = sum(seat.member.slots for seat in usable_seats(view, watch) if seat.warm)
    slots = min(spec.workers_max, here)
    if slots <= round_.world_size:
        return None
    due = watch.turned_at + spec.resize_every_s
    if now < due:
        return Wait(due, f"{slots} workers would have a place; the size changes at intervals")
    if not (_fresh(watch, now) and view.latest_committed_slot > view.round_slot):
        why = f"{slots} workers would have a place; growing after a commit"
        return Wait(now + max(spec.resize_every_s, _LOOK_S), why)
    why = f"{slots} workers have a place, {round_.world_size} are at work"
    return RoundClosed(round_.number, Blame.RESIZE, why)


def _fresh(watch: Watch, now: float) -> bool:
    return watch.committed_at is not None and now - watch.committed_at <= _FRESH_S


def replaced(view: View, watch: Watch) -> bool:
    """Whether the next round could open at once: machines are here, and warm."""
    assert view.spec is not None
    slots = _warm_slots(view, watch)
    if slots >= view.spec.workers_max:
        return True
    return view.spec.elastic and slots >= view.spec.workers_min and expected_slots(view, watch) == 0


def _warm_slots(view: View, watch: Watch) -> int:
    return sum(seat.member.slots for seat in usable_seats(view, watch) if seat.warm)


def _saved_since(view: View, agents: list[AgentId]) -> bool:
    return view.latest_committed_slot > max(view.noticed_slots[agent] for agent in agents)


def _deadline(view: View, watch: Watch, agent: AgentId) -> float:
    assert view.spec is not None
    noticed = watch.noticed_at.get(agent, watch.led_since)
    left = view.notices[agent].seconds_left
    stay = UNKNOWN_NOTICE_S if left is None else left
    return float(noticed + stay + view.spec.limits.preemption_grace_s)
