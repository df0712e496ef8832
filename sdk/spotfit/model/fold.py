"""fold(view, entry) -> view: the meaning of every event, in one place. Total and pure."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    Blame,
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    Taken,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.view import DROPPED, Group, View
from spotfit.model.world import Place, Round


def fold(view: View, entry: Entry) -> View:
    """The view after one more entry."""
    after = _apply(view, entry.event)
    return replace(after, next_slot=view.next_slot + 1, run_id=view.run_id or entry.run_id)


def _apply(view: View, event: Event) -> View:
    match event:
        case FitStarted():
            return _start(view, event)
        case LeaderElected(epoch=epoch):
            return replace(view, leader=event, epoch=epoch)
        case Intended():
            return _intend(view, event)
        case Submitted():
            return _grant(view, event)
        case Refused():
            return _refuse(view, event)
        case NodeLost():
            return _lose(view, event)
        case Released(token=token, others=others):
            return _release(view, (token, *others))
        case Noticed(agent=agent, notice=notice):
            return replace(
                view,
                notices={**view.notices, agent: notice},
                noticed_slots={agent: view.next_slot, **view.noticed_slots},
            )
        case RoundOpened(round=opened):
            return _open(view, opened)
        case RoundClosed(blame=blame):
            return _close(view, event, blame)
        case CheckpointCommitted():
            return _commit(view, event)
        case CheckpointDropped(name=name):
            return _drop(view, name)
        case ValidationBegun():
            return _begin_validation(view, event)
        case ValidationEnded():
            return _end_validation(view, event)
        case TrainingEnded(ended=ended):
            return replace(view, training_ended=ended, round=None)
        case CancelRequested(why=why):
            return replace(view, cancelled=why)
        case FitEnded():
            return replace(view, ended=event, round=None, validation=None)
    assert_never(event)


def _start(view: View, event: FitStarted) -> View:
    """A new fit keeps the run's checkpoints, its round numbers and groups still to be let go.

    Who led the fit before does not lead this one: nobody has to wait for its lease.
    """
    return View(
        next_slot=view.next_slot,
        run_id=view.run_id,
        spec=event.spec,
        fits=view.fits + 1,
        epoch=view.epoch,
        groups={token: group for token, group in view.groups.items() if not group.released},
        last_round=view.last_round,
        checkpoints=view.checkpoints,
        dropped=view.dropped,
        latest_committed_slot=view.latest_committed_slot,
        unvalidated=view.unvalidated,
        verdicts=view.verdicts,
        attempts=view.attempts,
        endings=view.endings,
    )


def _intend(view: View, event: Intended) -> View:
    """Machines for validations come and go within one round: those let go are forgotten here."""
    role = event.request.role
    groups = view.groups
    if role == "validate":
        groups = {token: one for token, one in groups.items() if one.role != role or not one.let_go}
    return replace(view, groups={**groups, event.plan.token: Group(event.plan, role=role)})


def _grant(view: View, event: Submitted) -> View:
    group = view.groups[event.token]
    granted = _with_group(view, event.token, replace(group, handle=event.handle))
    if group.role == "validate":
        return granted
    return replace(granted, refusals=0, last_refusal=None)


def _with_group(view: View, token: Token, group: Group) -> View:
    return replace(view, groups={**view.groups, token: group})


def _release(view: View, tokens: tuple[Token, ...]) -> View:
    gone = {token: replace(view.groups[token], released=True) for token in tokens}
    return replace(view, groups={**view.groups, **gone})


def _refuse(view: View, event: Refused) -> View:
    group = view.groups[event.token]
    refused = _with_group(view, event.token, replace(group, refused=event.why))
    if group.role == "validate":
        return replace(
            refused,
            validator_refusals=view.validator_refusals + 1,
            no_validators=event.why if event.final else view.no_validators,
        )
    return replace(
        refused,
        refusals=view.refusals + 1,
        last_refusal=event.why,
        final_refusal=event.why if event.final else view.final_refusal,
    )


def _lose(view: View, event: NodeLost) -> View:
    group = view.groups[event.token]
    nodes = group.lost if event.comes_back else group.lost | {event.node}
    lost = _with_group(view, event.token, replace(group, lost=nodes))
    if event.agent is None and group.role == "validate":
        return replace(lost, validator_refusals=view.validator_refusals + 1)
    if event.agent is None and event.blame is Blame.PREEMPTION:
        first = 0 if group.lost else 1  # a group is refused once, however many machines it has
        return replace(lost, refusals=view.refusals + first, last_refusal=event.why)
    if event.agent is None:
        return replace(lost, stillborn=view.stillborn + 1)
    outage = {event.agent} if event.blame is Blame.PLATFORM else set()
    known = replace(
        lost, lost_agents=view.lost_agents | {event.agent}, outages=view.outages | outage
    )
    return _charge(known, event) if event.blame is not None else known


def _charge(view: View, event: NodeLost) -> View:
    """A round that was closed when only a connection was known to be broken cost nothing until
    now; it does once, however many machines went with it."""
    closed, place = view.last_closed, _broke_off(view, event)
    assert event.blame is not None
    if closed is None or closed.blame is not Blame.NETWORK or place is None:
        return view
    network = view.failures.get(Blame.NETWORK, 1) - 1
    charged = {Blame.NETWORK: network, event.blame: view.failures.get(event.blame, 0) + 1}
    failures = {blame: count for blame, count in {**view.failures, **charged}.items() if count}
    why = f"{closed.why}; {place.machine} is lost: {event.why}"
    taken = Taken({place.machine: tuple(place.ranks)}) if event.blame is Blame.PREEMPTION else None
    return replace(
        view,
        failures=failures,
        last_closed=replace(closed, blame=event.blame, why=why, taken=taken),
        fruitless=max(0, view.fruitless - (event.blame is Blame.PREEMPTION)),
    )


def _broke_off(view: View, event: NodeLost) -> Place | None:
    """The machine's place in the last round, if that was closed because its connection broke."""
    closed, last = view.last_closed, view.last_round
    if closed is None or last is None or closed.number != last.number or event.agent is None:
        return None
    place = last.place_of(event.agent)
    missing = {failure.rank for failure in closed.failures if failure.kind == "lost"}
    return place if place is not None and not missing.isdisjoint(place.ranks) else None


def _close(view: View, event: RoundClosed, blame: Blame) -> View:
    return replace(
        _outlived(view, event),
        round=None,
        last_closed=event,
        failures={**view.failures, blame: view.failures.get(blame, 0) + 1},
        fruitless=view.fruitless + (blame not in (Blame.PREEMPTION, Blame.RESIZE)),
    )


def _outlived(view: View, event: RoundClosed) -> View:
    """What its end teaches of the lives of groups. That changes its size at will lives on.

    Where the leader was lost with it nobody knows how long it lived: as long as it saved, at least.
    """
    age_s = view.group_age_s + (view.round_age_s if event.lived_s is None else event.lived_s)
    places = view.round.places if view.round else ()
    told = [view.noticed_slots[place.agent] for place in places if place.agent in view.notices]
    if event.blame is Blame.RESIZE and not told:
        return replace(view, group_age_s=age_s)
    saved = bool(told) and (event.safe or view.latest_committed_slot > max(told))
    return replace(view, endings=view.endings.with_end(age_s, saved=saved), group_age_s=0.0)


def _open(view: View, opened: Round) -> View:
    """A new round; what was let go, refused or lost before it is history, and needs no place any
    more: a view must not grow for weeks."""
    groups = {
        token: group
        for token, group in view.groups.items()
        if not group.released and group.refused is None
    }
    here = {a: notice for a, notice in view.notices.items() if a not in view.lost_agents}
    lost = view.lost_agents & _still_asked_for(view)
    return replace(
        view,
        round=opened,
        last_round=opened,
        round_age_s=0.0,
        round_slot=view.next_slot,
        stillborn=0,
        groups=groups,
        lost_agents=lost,
        outages=view.outages & lost,
        notices=here,
        noticed_slots={agent: view.noticed_slots[agent] for agent in here},
    )


def _still_asked_for(view: View) -> set[AgentId | None]:
    """Agents whose loss may still matter although they have no place in the round that begins."""
    former = view.leader.lost if view.leader else None
    return {former, view.validation.agent if view.validation else None}


def _without(view: View, name: str) -> tuple[str, ...]:
    return tuple(one for one in view.dropped if one != name)


def _commit(view: View, event: CheckpointCommitted) -> View:
    return replace(
        view,
        checkpoints=(*view.checkpoints, event),
        dropped=_without(view, event.name),
        fruitless=0,
        round_age_s=view.round_age_s if event.age_s is None else event.age_s,
        latest_committed_slot=view.next_slot,
        unvalidated=(*view.unvalidated, event) if event.validation else view.unvalidated,
    )


def _drop(view: View, name: str) -> View:
    marks = {one.mark for one in view.checkpoints if one.name == name}
    return replace(
        view,
        checkpoints=tuple(one for one in view.checkpoints if one.name != name),
        dropped=(*_without(view, name), name)[-DROPPED:],
        unvalidated=tuple(one for one in view.unvalidated if one.name != name),
        verdicts={mark: how for mark, how in view.verdicts.items() if mark not in marks},
    )


def _begin_validation(view: View, event: ValidationBegun) -> View:
    again = view.validation is not None and view.validation.mark == event.mark
    group = view.groups.get(event.token)
    worked = group is not None and group.role == "validate"
    return replace(
        view,
        validation=event,
        attempts=event.attempt,
        tries=view.tries + 1 if again else 1,
        validator_refusals=0 if worked else view.validator_refusals,
    )


def _end_validation(view: View, event: ValidationEnded) -> View:
    """What was found belongs to the checkpoint from now on, as if it had been reported with it."""
    checkpoints = tuple(
        replace(one, metrics={**one.metrics, **event.metrics}) if one.mark == event.mark else one
        for one in view.checkpoints
    )
    return replace(
        view,
        checkpoints=checkpoints,
        unvalidated=tuple(one for one in view.unvalidated if one.mark != event.mark),
        verdicts={**view.verdicts, event.mark: event},
        validation=None,
        tries=0,
    )
