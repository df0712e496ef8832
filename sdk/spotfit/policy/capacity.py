"""How many workers' worth of machines are missing, and which machines are lost for good."""

from __future__ import annotations

from collections.abc import Iterator

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import Blame, NodeLost
from spotfit.model.group import NodeState, Role
from spotfit.model.view import View
from spotfit.model.watch import Seat, Watch
from spotfit.policy.absence import Word, absent_since, backend_says

LINGER_S = 15.0
"""How long machines may take to leave by themselves."""
_MAX_BACKOFF_S = 60.0
_MOST_STILLBORN = 20


def usable_seats(view: View, watch: Watch, role: Role = "train") -> list[Seat]:
    """Connected agents that may be given that work: not lost, not leaving, not let go."""
    return [
        seat
        for agent, seat in watch.seats.items()
        if agent not in view.lost_agents
        and agent not in view.notices
        and seat.notice is None
        and _stands(view, seat.member.token, seat.member.node, role)
    ]


def is_last(watch: Watch, token: Token, node: int) -> bool:
    """Whether its backend has brought that machine back as often as it does: should nobody be
    awake when it is lost next, nobody would wake any more."""
    status = watch.statuses.get(token)
    return status is not None and any(one.last for one in status.nodes[node : node + 1])


def lasting(view: View, watch: Watch) -> list[Seat]:
    """Those for workers whose machines, if they are lost, come back as before."""
    return [
        seat
        for seat in usable_seats(view, watch)
        if not is_last(watch, seat.member.token, seat.member.node)
    ]


def expected_slots(view: View, watch: Watch) -> int:
    """Slots of workers' machines that were asked for and have not joined yet."""
    here = {(seat.member.token, seat.member.node) for seat in watch.seats.values()}
    return sum(
        group.plan.slots
        for token, group in view.groups.items()
        if group.role == "train"
        for node in group.standing
        if (token, node) not in here
    )


def too_few(view: View, watch: Watch) -> bool:
    """Whether the run needs more workers, at least, than have a place or will have one."""
    assert view.spec is not None
    here = sum(seat.member.slots for seat in usable_seats(view, watch))
    return here + expected_slots(view, watch) < max(1, view.spec.workers_min)


def missing_workers(view: View, watch: Watch) -> int:
    """How many more workers the run wants than it has or has asked for.

    A machine that will not be brought back once more is replaced while it works.
    """
    assert view.spec is not None
    if watch.caretaker:
        return view.spec.workers_max - _standing_slots(view)
    have = sum(seat.member.slots for seat in lasting(view, watch))
    return view.spec.workers_max - have - expected_slots(view, watch)


def workers_to_order(view: View, missing: int) -> int:
    """All that are missing; an elastic group asks for half as many with every refusal.

    But never for fewer than it needs at least: what it could not use would cost nevertheless.
    """
    assert view.spec is not None
    if not view.spec.elastic:
        return missing
    have = view.spec.workers_max - missing
    least = max(1, view.spec.workers_min - have)
    return max(least, missing >> view.refusals)


def may_ask_at(view: View, watch: Watch) -> float:
    """When the market may be asked again, after it refused or gave machines that died at birth."""
    disappointments = max(view.refusals, view.stillborn)
    if watch.refused_at is None or disappointments == 0:
        return float("-inf")
    return watch.refused_at + min(_MAX_BACKOFF_S, 0.5 * 2.0 ** min(disappointments, 10))


def hopeless(view: View) -> str | None:
    """Why asking for more machines is pointless: far too many in a row never came to life."""
    asked = [group.plan.nodes for group in view.groups.values() if group.role == "train"]
    biggest = max(asked, default=1)
    if view.stillborn <= _MOST_STILLBORN * biggest:
        return None
    return f"{view.stillborn} machines in a row ended before their agents could join"


def lost_machines(view: View, watch: Watch, now: float) -> Iterator[NodeLost]:
    """Machines that are gone, with how we know."""
    here = {(seat.member.token, seat.member.node): agent for agent, seat in watch.seats.items()}
    sat = _last_known_agents(view, watch)
    for token, group in view.groups.items():
        for node in group.standing:
            if _needed_no_more(view, watch, token, node):
                continue
            agent = here.get((token, node))
            if agent is not None:
                if _will_not_stop(view, watch, agent, now):
                    yield NodeLost(token, node, agent, "its workers would not end")
                elif _has_left(view, agent):
                    yield NodeLost(token, node, agent, "it announced its end, and was replaced")
                elif _is_relieved(view, watch, token, node, agent):
                    told = "its backend would not bring it back once more, and it was replaced"
                    yield NodeLost(token, node, agent, told)
                elif (before := _lived_there_before(view, watch, token, node)) is not None:
                    told = "its backend brought it back, with another agent"
                    yield NodeLost(token, node, before, told, Blame.PREEMPTION, comes_back=True)
                continue
            agent = sat.get((token, node))
            why = _why_lost(view, watch, now, token, node, agent)
            if why:
                blame = _blame(view, watch, token, node, agent)
                yield NodeLost(token, node, agent, why, blame)


def _needed_no_more(view: View, watch: Watch, token: Token, node: int) -> bool:
    """After the training the workers' machines leave by themselves; only who sees no agent has to
    know which of them are gone, and whoever waits for a validation on one."""
    if view.training_ended is None or watch.caretaker or view.groups[token].role != "train":
        return False
    at_work = view.validation
    return at_work is None or (at_work.token, at_work.node) != (token, node)


def _lived_there_before(view: View, watch: Watch, token: Token, node: int) -> AgentId | None:
    """The agent that worked on a machine that another agent has joined from since."""
    worked = [*(view.last_round.places if view.last_round else ()), view.validation]
    agents = [one.agent for one in worked if one and (one.token, one.node) == (token, node)]
    known = watch.seats.keys() | view.lost_agents
    return next((agent for agent in agents if agent not in known), None)


def _will_not_stop(view: View, watch: Watch, agent: AgentId, now: float) -> bool:
    assert view.spec is not None
    stuck = view.round is None and watch.seats[agent].running is not None
    return stuck and now - watch.turned_at > view.spec.tempo.stop_patience_s


def _has_left(view: View, agent: AgentId) -> bool:
    """A round was opened without the machine that announced its end: it is not needed any more."""
    noticed = view.noticed_slots.get(agent)
    if noticed is None or view.round is None or view.round_slot < noticed:
        return False
    return view.round.place_of(agent) is None


def _is_relieved(view: View, watch: Watch, token: Token, node: int, agent: AgentId) -> bool:
    """A full round works without a machine that was replaced in time."""
    assert view.spec is not None
    if view.round is None or view.round.world_size < view.spec.workers_max:
        return False
    spare = view.round.place_of(agent) is None and view.groups[token].role == "train"
    return spare and is_last(watch, token, node)


def _standing_slots(view: View) -> int:
    """For one who sees no agent: everything not known to be lost, less what announced its end."""
    leaving = {
        (place.token, place.node)
        for place in (view.last_round.places if view.last_round else ())
        if place.agent in view.notices
    }
    return sum(
        group.plan.slots
        for token, group in view.groups.items()
        if group.role == "train"
        for node in group.standing
        if (token, node) not in leaving
    )


def _last_known_agents(view: View, watch: Watch) -> dict[tuple[Token, int], AgentId]:
    places = view.last_round.places if view.last_round else ()
    sat = {(place.token, place.node): place.agent for place in places}
    if view.validation is not None:
        sat[view.validation.token, view.validation.node] = view.validation.agent
    return sat | dict(watch.known)


def _why_lost(
    view: View, watch: Watch, now: float, token: Token, node: int, agent: AgentId | None
) -> str | None:
    assert view.spec is not None
    tempo = view.spec.tempo
    status = watch.statuses.get(token)
    if status and node < len(status.nodes) and status.nodes[node].over:
        return status.nodes[node].reason or f"the backend says it is {status.nodes[node].state}"
    granted = watch.granted.get(token)
    patience_s = tempo.boot_patience_s
    if watch.caretaker:
        silent = granted is not None and now - max(granted, watch.led_since) > patience_s
        return f"nobody on it took the lead within {patience_s:.0f} s" if silent else None
    if agent is not None and view.leader and view.leader.lost == agent:
        said = backend_says(watch, token, node, watch.led_since)
        settled = said is not Word.NOTHING or now - watch.led_since > tempo.settle_s
        return "it led, and its connections broke" if settled else None
    if agent is not None and now - _last_heard(watch, agent) > tempo.rejoin_s:
        return f"its agent was not heard again for {tempo.rejoin_s:.0f} s"
    if agent is None and granted is not None and now - granted > patience_s:
        return f"its agent did not join within {patience_s:.0f} s"
    return None


def _blame(
    view: View, watch: Watch, token: Token, node: int, agent: AgentId | None
) -> Blame | None:
    """Machines are taken away; one of which its backend says that it runs has another trouble.

    One that never came to life is nobody's fault, unless the market went back on its word.
    """
    if agent is None:
        status = watch.statuses.get(token)
        known = status.nodes[node : node + 1] if status else ()
        refused = any(one.state is NodeState.REFUSED for one in known)
        return Blame.PREEMPTION if refused else None
    since = absent_since(view, watch, agent)
    runs = since is not None and backend_says(watch, token, node, since) is Word.RUNS
    return Blame.PLATFORM if runs and agent not in view.notices else Blame.PREEMPTION


def _last_heard(watch: Watch, agent: AgentId) -> float:
    return max(watch.led_since, watch.gone.get(agent, 0.0))


def _stands(view: View, token: Token, node: int, role: Role) -> bool:
    group = view.groups.get(token)
    return group is not None and group.role == role and group.stands(node)
