"""Which checkpoint is validated next, and where: on a machine of its own, or beside the workers.

One at a time, in the order of their commits. A machine is asked for while something is to be
validated and the workers have all of theirs, kept for a while, and let go.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotfit.core.ids import Token
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    LeaderElected,
    NodeLost,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import Role
from spotfit.model.view import View
from spotfit.model.watch import Seat, Watch
from spotfit.policy import capacity
from spotfit.policy.actions import Action, Order, Release, Wait, Write

_MOST_TRIES = 20
"""A validation that was begun so often never comes to an end."""
_MOST_REFUSALS = 40
"""So many machines in a row that were refused or died at birth: there are none."""
_WORKERS_FIRST = 3
"""After so many refusals in a row the workers get what the machine for validations takes."""
_SOONEST_S = 1.0
_LATEST_S = 300.0
_LATEST_ALONE_S = 60.0


def outstanding(view: View) -> tuple[CheckpointCommitted, ...]:
    """What this fit still has to validate; nothing, where it brought nothing to validate with."""
    assert view.spec is not None
    return view.unvalidated if view.spec.validation is not None else ()


def ending(view: View, ended: FitEnded) -> Write:
    """The end of a fit whose training is over: at once, or after the last validation."""
    return Write(TrainingEnded(ended) if outstanding(view) else ended)


def note_answer(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Write down what came of the validation under way."""
    current, told = view.validation, watch.assessed
    if current is None or told is None or told.attempt != current.attempt:
        return
    if told.status != "lost":
        yield Write(
            ValidationEnded(current.name, current.mark, told.status, told.metrics, told.why)
        )


def end_at_last(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """The end that was put off, once nothing is left to validate or nobody will come to do it."""
    if view.training_ended is None:
        return
    if not outstanding(view) or (_none_to_be_had(view) and not _anybody(view, watch)):
        yield Write(view.training_ended)


def begin(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Assign the next validation, or one whose machine is gone, as soon as somebody is there."""
    due = outstanding(view)
    if not due or watch.caretaker or (view.validation is not None and not _lost(view, watch)):
        return
    kept = due[0]
    hopeless = _never(view)
    if hopeless is not None:
        yield Write(ValidationEnded(kept.name, kept.mark, "failed", why=hopeless))
        return
    rested = watch.validation_at + _pause_s(view, watch)
    if now < rested:
        yield Wait(rested, f"a validation came to nothing {view.tries} times")
        return
    seat = _assessor(view, watch, now)
    if seat is None:
        yield Wait(max(now + 1.0, _patience_ends(view, watch)), "nobody is there to validate")
        return
    member, attempt = seat.member, view.attempts + 1
    where = "on a machine of its own" if _role(view, member.token) != "train" else "beside workers"
    yield Write(
        ValidationBegun(
            kept.name, kept.mark, attempt, member.agent, member.token, member.node, where
        )
    )


def give_up(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """A machine that cannot be made ready is as good as one that never came."""
    for seat in capacity.usable_seats(view, watch, "validate"):
        if seat.unable is not None:
            *_, last_line = ("no reason was told", *seat.unable.told.strip().splitlines())
            why = f"it cannot be made ready: {last_line}"
            yield Write(NodeLost(seat.member.token, seat.member.node, None, why))


def order(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Ask for a machine of its own, if one is wanted and none is here or on its way."""
    if not outstanding(view) or _machine_stands(view, watch) or _none_to_be_had(view):
        return
    if not _wants_machine(view, watch):
        return
    asked_at = _may_ask_at(view, watch)
    if now < asked_at:
        yield Wait(asked_at, f"refused {view.validator_refusals} times for validations")
    else:
        why = f"{len(outstanding(view))} checkpoints are to be validated"
        yield Order(1, why, "validate")


def release(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """Let the machine go when there was nothing to validate for a while, or workers need it."""
    assert view.spec is not None
    idle_ends = max(watch.validation_at, watch.led_since) + view.spec.tempo.validator_idle_s
    for token in _held(view, "validate"):
        if _sits_on(view, watch, token):
            continue
        if _may_go(view, watch, token) or (not outstanding(view) and now >= idle_ends):
            yield Release(token)
        elif not outstanding(view):
            yield Wait(idle_ends, "nothing is to be validated")


def hand_over(view: View, watch: Watch) -> LeaderElected | None:
    """The lead belongs on a machine that stays: with the workers, and after them with whoever
    validates. None where it is well placed, or nobody is there to take it."""
    mine = watch.seats.get(watch.me)
    if mine is None or view.round is not None:
        return None
    role: Role = "train" if view.training_ended is None else "validate"
    if _role(view, mine.member.token) == role:
        return None
    heirs = sorted(capacity.usable_seats(view, watch, role), key=_seniority)
    if not heirs:
        return None
    heir = heirs[0].member
    why = "the workers are elsewhere" if role == "train" else "only validations are left"
    return LeaderElected(heir.agent, view.epoch + 1, heir.hub, why)


def shed(view: View, watch: Watch, now: float) -> Iterator[Action]:
    """After the training: agents nobody needs leave by themselves, and their groups are let go."""
    if view.training_ended is None or watch.caretaker:
        return
    here = {seat.member.token for seat in watch.seats.values()}
    for token in _held(view, "train"):
        if _sits_on(view, watch, token) or _is_at_work(view, token):
            continue
        linger = watch.turned_at + capacity.LINGER_S
        if token in here and now < linger:
            yield Wait(min(now + 1.0, linger), "machines are leaving by themselves")
        else:
            yield Release(token)


# --- where -------------------------------------------------------------------------------------


def _assessor(view: View, watch: Watch, now: float) -> Seat | None:
    """Who validates: a machine of its own before the leader's, that before another one's."""
    own = sorted(capacity.usable_seats(view, watch, "validate"), key=_seniority)
    if own:
        return own[0]
    if not _may_go_beside(view, watch, now):
        return None
    beside = capacity.usable_seats(view, watch)
    return min(
        beside, key=lambda seat: (seat.member.agent != watch.me, _seniority(seat)), default=None
    )


def _may_go_beside(view: View, watch: Watch, now: float) -> bool:
    assert view.spec is not None
    assert view.spec.validation is not None
    own_machine = view.spec.validation.own_machine
    if own_machine is not None:
        return not own_machine
    return (
        view.training_ended is not None
        or view.validator_refusals > 0
        or _none_to_be_had(view)
        or not (_machine_stands(view, watch) or _wants_machine(view, watch))
        or now >= _patience_ends(view, watch)
    )


def _patience_ends(view: View, watch: Watch) -> float:
    assert view.spec is not None
    return max(watch.validation_at, watch.led_since) + view.spec.tempo.validator_patience_s


def _wants_machine(view: View, watch: Watch) -> bool:
    """While there is training, its machines come first; afterwards they may do what is left."""
    assert view.spec is not None
    assert view.spec.validation is not None
    own_machine = view.spec.validation.own_machine
    if view.training_ended is None:
        complete = capacity.missing_workers(view, watch) <= 0
        return own_machine is not False and not watch.caretaker and complete
    return own_machine is True or not _anybody(view, watch)


def _anybody(view: View, watch: Watch) -> bool:
    """Whether somebody is there who may validate, or (for who sees nobody) some machine stands."""
    if watch.caretaker:
        return any(group.standing for group in view.groups.values())
    assert view.spec is not None
    assert view.spec.validation is not None
    beside = capacity.usable_seats(view, watch)
    own = capacity.usable_seats(view, watch, "validate")
    return bool(own) or (bool(beside) and view.spec.validation.own_machine is not True)


def _machine_stands(view: View, watch: Watch) -> bool:
    """Whether a machine for validations is here or on its way, and will not leave."""
    return any(
        watch.known.get((token, node)) not in view.notices
        for token, group in view.groups.items()
        if group.role == "validate"
        for node in group.standing
    )


def _lost(view: View, watch: Watch) -> bool:
    """Whether nothing will come of the validation under way."""
    current = view.validation
    assert current is not None
    group = view.groups.get(current.token)
    given_up = group is None or not group.stands(current.node)
    return given_up or current.agent in view.lost_agents or _in_vain(view, watch)


def _in_vain(view: View, watch: Watch) -> bool:
    """Whether who validates has told that nothing comes of it, by no fault of the user's."""
    current, told = view.validation, watch.assessed
    if current is None or told is None:
        return False
    return told.attempt == current.attempt and told.status == "lost"


def _pause_s(view: View, watch: Watch) -> float:
    """What came to nothing is tried at once, and then ever more slowly."""
    if not _in_vain(view, watch) or view.tries < 2:
        return 0.0
    return min(_LATEST_ALONE_S, _SOONEST_S * 2.0 ** min(view.tries, 10))


def _never(view: View) -> str | None:
    """Why validating what is next is pointless."""
    assert view.spec is not None
    assert view.spec.validation is not None
    if view.tries >= _MOST_TRIES:
        return f"it was begun {view.tries} times, and came to nothing each time"
    if view.spec.validation.own_machine and _none_to_be_had(view):
        return f"no machine of its own can be had: {view.no_validators or 'all died at birth'}"
    return None


# --- machines ----------------------------------------------------------------------------------


def _none_to_be_had(view: View) -> bool:
    return view.no_validators is not None or view.validator_refusals > _MOST_REFUSALS


def _may_ask_at(view: View, watch: Watch) -> float:
    if watch.validator_refused_at is None or view.validator_refusals == 0:
        return float("-inf")
    latest_s = _LATEST_S if view.training_ended is None else _LATEST_ALONE_S
    pause_s = _SOONEST_S * 2.0 ** min(view.validator_refusals - 1, 10)
    return watch.validator_refused_at + min(latest_s, pause_s)


def _may_go(view: View, watch: Watch, token: Token) -> bool:
    """Whether the machine goes though something is to be validated."""
    if view.training_ended is None:
        return _workers_lack_it(view, watch)
    seated = any(seat.member.token == token for seat in watch.seats.values())
    return not seated and not watch.caretaker and not _wants_machine(view, watch)


def _workers_lack_it(view: View, watch: Watch) -> bool:
    """Whether the market has nothing for the workers while this machine stands."""
    return view.refusals >= _WORKERS_FIRST and capacity.missing_workers(view, watch) > 0


def _held(view: View, role: Role) -> list[Token]:
    return [
        token
        for token, group in view.groups.items()
        if group.role == role and group.handle is not None and not group.let_go
    ]


def _sits_on(view: View, watch: Watch, token: Token) -> bool:
    """Whether whoever judges lives there."""
    mine = watch.seats.get(watch.me)
    return mine is not None and mine.member.token == token


def _is_at_work(view: View, token: Token) -> bool:
    return view.validation is not None and view.validation.token == token


def _role(view: View, token: Token) -> Role | None:
    group = view.groups.get(token)
    return group.role if group is not None else None


def _seniority(seat: Seat) -> tuple[float, str]:
    return (seat.since, seat.member.agent)
