"""fold(view, entry) -> view: the meaning of every event, in one place. Total and pure."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from spotfit.core.ids import Token
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
)
from spotfit.model.view import Group, View
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
        case Intended(plan=plan):
            return _with_group(view, plan.token, Group(plan))
        case Submitted(token=token, handle=handle):
            granted = _with_group(view, token, replace(view.groups[token], handle=handle))
            return replace(granted, refusals=0, last_refusal=None)
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
                noticed_slots={**view.noticed_slots, agent: view.next_slot},
            )
        case RoundOpened(round=opened):
            return _open(view, opened)
        case RoundClosed(blame=blame):
            return _close(view, event, blame)
        case CheckpointCommitted():
            return _commit(view, event)
        case CheckpointDropped(name=name):
            kept = tuple(one for one in view.checkpoints if one.name != name)
            return replace(view, checkpoints=kept, dropped=view.dropped | {name})
        case CancelRequested(why=why):
            return replace(view, cancelled=why)
        case FitEnded():
            return replace(view, ended=event, round=None)
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
    )


def _with_group(view: View, token: Token, group: Group) -> View:
    return replace(view, groups={**view.groups, token: group})


def _release(view: View, tokens: tuple[Token, ...]) -> View:
    gone = {token: replace(view.groups[token], released=True) for token in tokens}
    return replace(view, groups={**view.groups, **gone})


def _refuse(view: View, event: Refused) -> View:
    refused = _with_group(view, event.token, replace(view.groups[event.token], refused=event.why))
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
        view,
        round=None,
        last_closed=event,
        failures={**view.failures, blame: view.failures.get(blame, 0) + 1},
        fruitless=view.fruitless + (blame not in (Blame.PREEMPTION, Blame.RESIZE)),
    )


def _open(view: View, opened: Round) -> View:
    """A new round; what was let go or refused before it is history, and needs no place any more."""
    groups = {
        token: group
        for token, group in view.groups.items()
        if not group.released and group.refused is None
    }
    here = {a: notice for a, notice in view.notices.items() if a not in view.lost_agents}
    return replace(
        view,
        round=opened,
        last_round=opened,
        round_slot=view.next_slot,
        stillborn=0,
        groups=groups,
        notices=here,
        noticed_slots={agent: view.noticed_slots[agent] for agent in here},
    )


def _commit(view: View, event: CheckpointCommitted) -> View:
    return replace(
        view,
        checkpoints=(*view.checkpoints, event),
        dropped=view.dropped - {event.name},
        fruitless=0,
        latest_committed_slot=view.next_slot,
    )
