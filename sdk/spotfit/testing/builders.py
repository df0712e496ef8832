"""Facts for tests: each is valid as it comes, and a story names only what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import CheckpointCommitted, Entry, Event, LeaderElected
from spotfit.model.fold import fold
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.model.spec import RunSpec
from spotfit.model.view import Group, View
from spotfit.model.watch import Ready, Seat, Watch
from spotfit.model.world import Member, Notice, Place, Round

RUN = RunId("0123456789abcdef0123456789abcdef")
TOKEN = Token("t-1")
_BOTH_RUN = (NodeState.RUNNING, NodeState.RUNNING)


def an_agent(n: int) -> AgentId:
    """The agent that sits on machine `n` of the first group."""
    return AgentId(f"a{n}")


def a_spec(**given: Any) -> RunSpec:
    """Two workers, no retries."""
    if "workers_max" in given or "workers_min" in given:
        given.setdefault("workers_min", given.get("workers_max"))
        given.setdefault("workers_max", given["workers_min"])
        given.setdefault("elastic", given["workers_min"] < given["workers_max"])
    usual: dict[str, Any] = {"workers_min": 2, "workers_max": 2}
    names: dict[str, Any] = {"run_id": RUN, "name": "digits", "fit_id": "f-1"}
    return RunSpec(**{**names, **usual, **given})


def a_member(n: int = 0, **given: Any) -> Member:
    """The agent on machine `n` of the first group, with room for one worker."""
    usual: dict[str, Any] = {
        "agent": an_agent(n),
        "host": f"10.0.0.{n}",
        "hub": f"10.0.0.{n}:7000",
        "slots": 1,
        "token": TOKEN,
        "node": n,
    }
    return Member(**{**usual, **given})


def a_seat(n: int = 0, *, member: Member | None = None, **given: Any) -> Seat:
    """That member, connected since the beginning and idle."""
    usual: dict[str, Any] = {"member": member or a_member(n), "since": 0.0, "heard": 0.0}
    return Seat(**{**usual, **given})


def seats(*some: Seat) -> dict[AgentId, Seat]:
    """Seats by their agents, as a watch holds them."""
    return {seat.member.agent: seat for seat in some}


def a_round(number: int = 1, *, members: Iterable[Member] = (), **given: Any) -> Round:
    """A round of those members in that order; of two, if none are named."""
    places: list[Place] = []
    first = 0
    for member in tuple(members) or (a_member(0), a_member(1)):
        seat = (member.host, member.token, member.node, member.vault)
        places.append(Place(member.agent, len(places), first, member.slots, *seat))
        first += member.slots
    return Round(number, tuple(places), **given)


def a_group(*, token: Token = TOKEN, nodes: int = 2, slots: int = 1, **given: Any) -> Group:
    """Machines that were granted."""
    handle = GroupHandle(token, "local", f"group-{token}")
    plan = GroupPlan(token, "local", nodes, slots)
    return Group(**{"plan": plan, "handle": handle, **given})


def a_request(token: Token = TOKEN, workers: int = 2) -> GroupRequest:
    """What is asked of a backend."""
    return GroupRequest(token, workers, workers)


def a_status(*states: NodeState) -> GroupStatus:
    """How a backend sees a group's machines; two that run, if nothing is said."""
    return GroupStatus(tuple(NodeStatus(one) for one in states or _BOTH_RUN))


def a_last_life(*which: int, nodes: int = 2) -> GroupStatus:
    """All run; those would not be brought back once more."""
    return GroupStatus(
        tuple(NodeStatus(NodeState.RUNNING, last=node in which) for node in range(nodes))
    )


def a_notice(**given: Any) -> Notice:
    """Two minutes are left."""
    return Notice(**{"reason": "spot reclaim", "seconds_left": 120.0, **given})


def a_commit(name: str = "c1", **given: Any) -> CheckpointCommitted:
    """A checkpoint of one rank, from the first report of the first round."""
    usual: dict[str, Any] = {"round": 1, "report": 0, "metrics": {"loss": 1.0}, "ranks": (0,)}
    return CheckpointCommitted(name, **{**usual, **given})


def a_ready(name: str = "c1", **given: Any) -> Ready:
    """The same, before its entry."""
    usual: dict[str, Any] = {"round": 1, "report": 0, "metrics": {"loss": 1.0}, "ranks": (0,)}
    return Ready(name, **{**usual, **given})


def a_view(**given: Any) -> View:
    """A run of two workers that a0 leads, with two machines granted and no round open.

    A `round` that is given has been opened in the last slot.
    """
    usual: dict[str, Any] = {
        "next_slot": 5,
        "run_id": RUN,
        "spec": a_spec(),
        "fits": 1,
        "leader": LeaderElected(an_agent(0), 1, a_member(0).hub),
        "epoch": 1,
        "groups": {TOKEN: a_group()},
    }
    if "round" in given:
        usual |= {"last_round": given["round"], "round_slot": given.get("next_slot", 5) - 1}
    return View(**{**usual, **given})


def a_watch(**given: Any) -> Watch:
    """What a0 sees while it leads: both agents connected and idle, and the bucket searched."""
    usual: dict[str, Any] = {"me": an_agent(0), "seats": seats(a_seat(0), a_seat(1))}
    return Watch(**{**usual, **given})


def an_entry(event: Event, **given: Any) -> Entry:
    """That event, as the first leader writes it down."""
    usual: dict[str, Any] = {"run_id": RUN, "by": an_agent(0), "event": event}
    return Entry(**{**usual, **given})


def told(*events: Event, view: View | None = None) -> View:
    """The view after those events."""
    after = view or View()
    for event in events:
        after = fold(after, an_entry(event))
    return after
