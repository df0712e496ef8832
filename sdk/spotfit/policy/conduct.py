"""The whole of judgement: (view, watch, now) -> the one next thing to do, or how long to wait.

The order below is the order of urgency, and what may wait for a cloud comes after what need not.
One decision at a time: what comes next is judged from the view that this one led to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    LeaderElected,
    Noticed,
    RankFailure,
    Released,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.view import View
from spotfit.model.watch import Ready, Watch
from spotfit.model.world import Round
from spotfit.policy import (
    absence,
    capacity,
    drain,
    failure,
    hang,
    rendezvous,
    retention,
    uploads,
    validation,
)
from spotfit.policy.actions import Action, Order, Release, Rest, Submit, Wait, Write

_IDLE_S = 30.0
_LEAVING_S = 45.0
"""How long workers may take to end once all functions returned; they have a limit themselves."""


def conduct(view: View, watch: Watch, now: float) -> Action:
    """The most urgent action, or the soonest of all reasons to look again."""
    waits = [Wait(now + _IDLE_S, "all is well")]
    for judge in _AFTER_THE_END if view.ended else _WHILE_IT_RUNS:
        for action in judge(view, watch, now):
            if not isinstance(action, Wait):
                return action
            waits.append(action)
    return min(waits, key=lambda wait: wait.until)


Judge = Callable[[View, Watch, float], Iterator[Action]]


def _finish_intents(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """What a leader wrote down it would do is done, by whoever leads now."""
    for token, group in view.groups.items():
        if group.pending:
            yield Submit(token)


def _cancel(view: View, watch: Watch, now: float) -> Iterator[Action]:
    if view.cancelled is not None:
        yield Write(FitEnded("cancelled", view.cancelled, metrics=watch.metrics))


def _end_on_trouble(view: View, watch: Watch, now: float) -> Iterator[Action]:
    if watch.trouble is not None:
        told = RankFailure(-1, "raised", watch.trouble.told, watch.trouble.pickle_key)
        yield Write(FitEnded("failed", watch.trouble.why, Blame.PLATFORM, (told,), watch.metrics))
    if view.training_ended is not None:
        return
    why = view.final_refusal or capacity.hopeless(view)
    if why is not None and view.round is None and capacity.too_few(view, watch):
        yield Write(FitEnded("failed", why, Blame.PLATFORM, metrics=watch.metrics))
    usable = capacity.usable_seats(view, watch)
    unable = next((seat.unable for seat in usable if seat.unable is not None), None)
    if unable is not None and view.round is None:
        yield Write(_with_metrics(failure.in_vain(unable), watch))


def _note_notices(view: View, watch: Watch, now: float) -> Iterator[Action]:
    for agent, seat in watch.seats.items():
        if seat.notice in (None, view.notices.get(agent)) or agent in view.lost_agents:
            continue
        yield Write(Noticed(agent, seat.notice))


def _note_losses(view: View, watch: Watch, now: float) -> Iterator[Action]:
    for lost in capacity.lost_machines(view, watch, now):
        yield Write(lost)
    former = view.leader.lost if view.leader is not None else None
    if watch.gone or (former is not None and former not in {*watch.seats, *view.lost_agents}):
        yield Wait(now + 1.0, "somebody is missing")


def _release_the_lost(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """A group of which no machine is left is let go, lest its request buys new ones."""
    for token, group in view.groups.items():
        if group.handle is not None and not group.released and not group.standing:
            yield Release(token)


def _commit(view: View, watch: Watch, now: float) -> Iterator[Action]:
    for ready in watch.ready:
        here = view.round is not None and view.round.number == ready.round
        yield Write(_committed(ready, age_s=_open_for_s(watch, now) if here else None))


def _drop(view: View, watch: Watch, now: float) -> Iterator[Action]:
    assert view.spec is not None
    try:
        pending = {one.name for one in view.unvalidated}
        expendable = retention.expendable(view.checkpoints, view.spec.keep, protected=pending)
    except ConfigError as wrong:
        yield Write(FitEnded("failed", wrong.what, Blame.PLATFORM, metrics=watch.metrics))
        return
    for name, why in expendable:
        yield Write(CheckpointDropped(name, why))


def _close_the_round(view: View, watch: Watch, now: float) -> Iterator[Action]:
    for action in _what_ends_the_round(view, watch, now):
        if isinstance(action, Write) and isinstance(action.event, RoundClosed):
            yield Write(replace(action.event, lived_s=_open_for_s(watch, now)))
        else:
            yield action


def _what_ends_the_round(view: View, watch: Watch, now: float) -> Iterator[Action]:
    if view.round is None or watch.caretaker:
        yield from _close_a_dead_round(view, watch)
    elif _all_returned(view.round, watch):
        yield from _finish(view, watch, now)  # whatever befalls a machine now, its work is done
    elif watch.doomed_since is not None:
        yield from _close_when_settled(view, watch, view.round, now)
    else:
        yield from _interrupt(view, watch, view.round, now)


def _close_a_dead_round(view: View, watch: Watch) -> Iterator[Action]:
    """A caretaker sees no agent; it closes a round only when all its machines are lost."""
    if view.round and all(place.agent in view.lost_agents for place in view.round.places):
        yield Write(failure.closing(view, watch, view.round))


def _close_when_settled(view: View, watch: Watch, round_: Round, now: float) -> Iterator[Action]:
    assert view.spec is not None
    assert watch.doomed_since is not None
    settled = watch.doomed_since + view.spec.tempo.settle_s
    unexplained = any(absence.unexplained(view, watch, place) for place in round_.places)
    if now < settled and (unexplained or not watch.stopped):
        yield Wait(settled, "listening for the true cause")
    else:
        yield Write(failure.closing(view, watch, round_))


def _all_returned(round_: Round, watch: Watch) -> bool:
    return len(watch.returned) == round_.world_size


def _finish(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Once all is told, and the workers have left: what they do at their end they may finish."""
    left_by = (watch.returned_at or now) + _LEAVING_S
    if not watch.settled:
        yield Wait(now + 0.05, "the last reports are being told")
    elif not watch.stopped and now < left_by:
        yield Wait(left_by, "the workers are leaving")
    else:
        yield validation.ending(view, _finished(watch))


def _finished(watch: Watch) -> FitEnded:
    return FitEnded(
        "finished", metrics=watch.metrics, result_key=watch.result_key, unsaved=watch.unsaved
    )


def _interrupt(view: View, watch: Watch, round_: Round, now: float) -> Iterator[Action]:
    for judge in (
        drain.last_words,
        hang.not_begun,
        drain.leave_in_time,
        drain.renew,
        drain.regroup,
    ):
        verdict = judge(view, watch, round_, now)
        if isinstance(verdict, Wait):
            yield verdict
        elif verdict is not None:
            yield Write(verdict)


def _judge_failures(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Also the checkpoints of a run that has failed are kept: the next fit goes on from them."""
    ended = None if view.round is not None or view.training_ended else failure.verdict(view)
    if ended is None:
        return
    if not watch.surveyed:
        yield _until_surveyed(view, watch, now)
    elif not watch.settled:
        yield Wait(now + 0.05, "the callbacks are being told of the last failure")
    else:
        yield validation.ending(view, _with_metrics(ended, watch))


def _until_surveyed(view: View, watch: Watch, now: float) -> Wait:
    searching = Wait(now + 0.1, "searching the bucket for complete checkpoints")
    return uploads.awaited(view, watch, now) or searching


def _order(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Ask for what is missing, but not while those of the last round may still come back, nor
    whoever has said no for good: the run then lives on what it has."""
    assert view.spec is not None
    missing = capacity.missing_workers(view, watch)
    if missing <= 0 or _is_over(view) or view.final_refusal is not None:
        return
    asked_at = capacity.may_ask_at(view, watch)
    if now < asked_at:
        yield Wait(asked_at, f"refused {view.refusals} times: {view.last_refusal}")
    else:
        why = f"{missing} of {view.spec.workers_max} workers have no machine"
        yield Order(capacity.workers_to_order(view, missing), why)


def _hand_over(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Between rounds, a leader whose machine will go names one who stays: else the next round
    would end with it."""
    if view.round is not None or watch.caretaker:
        return
    stay = capacity.lasting(view, watch) or capacity.usable_seats(view, watch)
    heirs = sorted(stay, key=lambda seat: (seat.since, seat.member.agent))
    if (why := _why_resign(view, watch)) and heirs:
        heir = heirs[0].member
        yield Write(LeaderElected(heir.agent, view.epoch + 1, heir.hub, why))
        return
    better = None if why else validation.hand_over(view, watch)
    if better is not None:
        yield Write(better)


def _why_resign(view: View, watch: Watch) -> str:
    """Why somebody else should lead the next round; '' where the leader's machine stays."""
    if watch.me in view.notices:
        return "the leader before will be taken away"
    mine = watch.seats.get(watch.me)
    last = mine is not None and capacity.is_last(watch, mine.member.token, mine.member.node)
    if last and capacity.lasting(view, watch):
        return "the machine of the leader before would not be brought back once more"
    return ""


def _open_a_round(view: View, watch: Watch, now: float) -> Iterator[Action]:
    if view.round is not None or watch.caretaker or _is_over(view):
        return
    if not watch.surveyed:
        yield _until_surveyed(view, watch, now)
        return
    formed = rendezvous.next_round(view, watch, now)
    if isinstance(formed, Wait):
        yield formed
    else:
        why = f"{formed.world_size} workers on {len(formed.places)} machines"
        yield Write(RoundOpened(formed, why))


def _is_over(view: View) -> bool:
    """Whether no round will follow."""
    return view.training_ended is not None or failure.verdict(view) is not None


def _let_go(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """After the end: machines leave by themselves when they read of it; the rest is let go.

    The leader's own machine comes last: a backend whose machines end with their agents needs no
    call for it, which would kill the caller.
    """
    here = {seat.member.token for agent, seat in watch.seats.items() if agent != watch.me}
    mine = {seat.member.token for agent, seat in watch.seats.items() if agent == watch.me}
    linger = watch.turned_at + capacity.LINGER_S
    held = [token for token, group in view.groups.items() if group.handle and not group.let_go]
    leaving = [token for token in held if token in here and now < linger]
    if leaving:
        yield Wait(min(now + 1.0, linger), "machines are leaving by themselves")
    due = [token for token in held if token not in leaving and token not in mine]
    if due:
        yield Release(due[0], tuple(due[1:]))
    for token in held:
        if token in mine and token not in leaving:
            ends = watch.ends_itself and _all_leave(view, watch, token)
            yield Write(Released(token)) if ends else Release(token)


def _all_leave(view: View, watch: Watch, token: Token) -> bool:
    """Whether every machine of the group has an agent that ends it, or is known to be over."""
    status = watch.statuses.get(token)
    over = [node.over for node in status.nodes] if status else []
    return all(
        (token, node) in watch.known or over[node : node + 1] == [True]
        for node in range(view.groups[token].plan.nodes)
    )


def _rest(view: View, watch: Watch, now: float) -> Iterator[Action]:
    mine = {seat.member.token for agent, seat in watch.seats.items() if agent == watch.me}
    held = [token for token, group in view.groups.items() if group.handle and not group.released]
    linger_s = capacity.LINGER_S if held else 0.0
    if all(token in mine for token in held) and now >= watch.turned_at + linger_s:
        yield Rest()


def _committed(ready: Ready, *, age_s: float | None) -> CheckpointCommitted:
    return CheckpointCommitted(
        ready.name,
        ready.round,
        ready.report,
        ready.metrics,
        ready.ranks,
        ready.size_bytes,
        ready.validation,
        age_s,
        ready.snapshot,
        ready.step,
        ready.why,
        ready.at,
    )


def _open_for_s(watch: Watch, now: float) -> float | None:
    """How long the open round has been; only who opened it knows."""
    return now - watch.turned_at if watch.turned_at > watch.led_since else None


def _with_metrics(ended: FitEnded, watch: Watch) -> FitEnded:
    return replace(ended, metrics=watch.metrics)


_WHILE_IT_RUNS: tuple[Judge, ...] = (
    _cancel,
    _end_on_trouble,
    _note_notices,
    _commit,
    validation.note_answer,
    _drop,
    _close_the_round,
    _judge_failures,
    validation.end_at_last,
    _note_losses,
    _order,
    validation.give_up,
    validation.order,
    _hand_over,
    validation.begin,
    _open_a_round,
    _finish_intents,
    _release_the_lost,
    validation.release,
    validation.shed,
)

_AFTER_THE_END: tuple[Judge, ...] = (_finish_intents, _let_go, _rest)
