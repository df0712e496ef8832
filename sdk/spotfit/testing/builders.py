"""Builders of valid structs for tests. A test passes only the fields that matter to it.

`ManualClock`: virtual time for tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    AgentCrash,
    CheckpointCommitted,
    JournalEntry,
    JournalEvent,
    LeaderElected,
)
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.model.leader_state import (
    LeaderState,
    MemberStatus,
    ReadyCheckpoint,
    Returned,
    Training,
)
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Member, NodeAssignment, Notice, Round
from spotfit.model.view import JournalView, MachineGroup, View, fold
from spotfit.security.run_key import RunKey

RUN_ID = RunId("0123456789abcdef0123456789abcdef")
RUN_KEY = RunKey(b"the run key of tests, 32 bytes..", RUN_ID)
TOKEN = Token("t-1")
_TWO_RUNNING = (NodeState.RUNNING, NodeState.RUNNING)


def an_agent_id(n: int) -> AgentId:
    """Return the id of the agent on machine `n` of the first group: "a0", "a1", ..."""
    return AgentId(f"a{n}")


def a_spec(**fields: Any) -> RunSpec:
    """Return a run spec of two workers without retries; `fields` override those of `RunSpec`.

    One of `min_workers` and `max_workers` sets both; different values make the run elastic.
    """
    if "max_workers" in fields or "min_workers" in fields:
        fields.setdefault("min_workers", fields.get("max_workers"))
        fields.setdefault("max_workers", fields["min_workers"])
        fields.setdefault("is_elastic", fields["min_workers"] < fields["max_workers"])
    usual: dict[str, Any] = {"min_workers": 2, "max_workers": 2}
    names: dict[str, Any] = {"run_id": RUN_ID, "name": "digits", "fit_id": "f-1"}
    return RunSpec(**{**names, **usual, **fields})


def a_member(n: int = 0, **fields: Any) -> Member:
    """Return the agent on machine `n` of the first group, with one worker slot.

    `fields` override those of `Member`.
    """
    usual: dict[str, Any] = {
        "agent": an_agent_id(n),
        "host": f"10.0.0.{n}",
        "coordinator_address": f"10.0.0.{n}:7000",
        "slots": 1,
        "token": TOKEN,
        "node": n,
    }
    return Member(**{**usual, **fields})


def a_member_status(n: int = 0, *, member: Member | None = None, **fields: Any) -> MemberStatus:
    """Return the status of an agent that is connected since event-loop time 0 and idle.

    `member` is by default `a_member(n)`; `fields` override those of `MemberStatus`.
    """
    usual: dict[str, Any] = {
        "member": member or a_member(n),
        "joined_at": 0.0,
        "last_heard_at": 0.0,
    }
    return MemberStatus(**{**usual, **fields})


def member_statuses(*statuses: MemberStatus) -> dict[AgentId, MemberStatus]:
    """Return the statuses by agent id, as in `LeaderState.members`."""
    return {status.member.agent: status for status in statuses}


def a_round(number: int = 1, *, members: Iterable[Member] = (), **fields: Any) -> Round:
    """Return an open round with `members` as nodes, in this order; by default two members.

    World ranks are assigned in this order, one per slot of a member. `fields` override those of
    `Round`.
    """
    assignments: list[NodeAssignment] = []
    first_rank = 0
    for member in tuple(members) or (a_member(0), a_member(1)):
        node_rank = len(assignments)
        assignments.append(
            member.assign(node_rank=node_rank, first_rank=first_rank, num_workers=member.slots)
        )
        first_rank += member.slots
    return Round(number=number, assignments=tuple(assignments), **fields)


def a_group(*, token: Token = TOKEN, nodes: int = 2, slots: int = 1, **fields: Any) -> MachineGroup:
    """Return a group of `nodes` machines that were granted, with `slots` workers each.

    `token` is that of its request; `fields` override those of `MachineGroup`.
    """
    # The token is in the name, as backends derive it, so that groups of a test differ.
    handle = GroupHandle(token=token, provisioner="local", name=f"group-{token}")
    plan = GroupPlan(token=token, provisioner="local", num_nodes=nodes, slots_per_node=slots)
    return MachineGroup(**{"plan": plan, "handle": handle, **fields})


def a_request(token: Token = TOKEN, workers: int = 2) -> GroupRequest:
    """Return a request for the machines of `workers` workers, for `Provisioner.plan`."""
    return GroupRequest(token=token, num_workers=workers, total_workers=workers)


def a_group_status(*states: NodeState) -> GroupStatus:
    """Return what `Provisioner.observe` returns for machines in `states`, by node index.

    Without `states`: two running machines.
    """
    return GroupStatus(nodes=tuple(NodeStatus(state=state) for state in states or _TWO_RUNNING))


def a_final_group_status(*which: int, nodes: int = 2) -> GroupStatus:
    """Return the status of `nodes` running machines; those in `which` are on their last attempt.

    `which` are node indices: the backend will not restart these machines again.
    """
    return GroupStatus(
        nodes=tuple(
            NodeStatus(state=NodeState.RUNNING, is_last_attempt=node in which)
            for node in range(nodes)
        )
    )


def a_notice(**fields: Any) -> Notice:
    """Return a preemption notice with 120 seconds left; `fields` override those of `Notice`."""
    return Notice(**{"reason": "spot reclaim", "seconds_left": 120.0, **fields})


def a_committed_checkpoint(name: str = "c1", **fields: Any) -> CheckpointCommitted:
    """Return the journal event of a checkpoint of one rank, from the first report of round 1.

    `fields` override those of `CheckpointCommitted`.
    """
    usual: dict[str, Any] = {"round": 1, "report_index": 0, "metrics": {"loss": 1.0}, "ranks": (0,)}
    return CheckpointCommitted(name=name, **{**usual, **fields})


def an_agent_crash(n: int = 0, **fields: Any) -> AgentCrash:
    """Return the crash of the agent on machine `n` of the first group; `fields` override its own.

    It is a ValueError; all have the same signature.
    """
    usual: dict[str, Any] = {
        "agent": an_agent_id(n),
        "token": TOKEN,
        "node": n,
        "signature": "s",
        "traceback_text": "Traceback (most recent call last):\n  File\nValueError: no\n",
    }
    return AgentCrash(**{**usual, **fields})


def an_uploaded_checkpoint(name: str = "c1", **fields: Any) -> ReadyCheckpoint:
    """Return the same checkpoint as `a_committed_checkpoint`, uploaded but not yet committed.

    `fields` override those of `ReadyCheckpoint`.
    """
    usual: dict[str, Any] = {"round": 1, "report_index": 0, "metrics": {"loss": 1.0}, "ranks": (0,)}
    return ReadyCheckpoint(name=name, **{**usual, **fields})


def a_view(**fields: Any) -> View:
    """Return a view of a run with two workers, leader a0, two granted machines and no open round.

    `fields` override those of `View`. If `round` is passed, it was opened in the last journal slot.
    """
    usual: dict[str, Any] = {
        "next_slot": 5,
        "run_id": RUN_ID,
        "spec": a_spec(),
        "fit_count": 1,
        "leader": LeaderElected(
            leader=an_agent_id(0), epoch=1, coordinator_address=a_member(0).coordinator_address
        ),
        "epoch": 1,
        "groups": {TOKEN: a_group()},
    }
    # As after folding `RoundOpened`: policies compare commits with the slot of the round.
    if "round" in fields:
        usual |= {
            "last_round": fields["round"],
            "round_opened_slot": fields.get("next_slot", 5) - 1,
        }
    return View(**{**usual, **fields})


def a_leader_state(**fields: Any) -> LeaderState:
    """Return the state of leader a0, with agents a0 and a1 connected and idle.

    `fields` override those of `LeaderState`.
    """
    usual: dict[str, Any] = {
        "agent_id": an_agent_id(0),
        "members": member_statuses(a_member_status(0), a_member_status(1)),
    }
    return LeaderState(**{**usual, **fields})


def a_training(**fields: Any) -> Training:
    """Return the phase of a round of two workers that was opened at event-loop time 0.

    `fields` override those of `Training`.
    """
    return Training(**{"round": a_round(), "since": 0.0, **fields})


def a_returned(**fields: Any) -> Returned:
    """Return the phase of a round of two workers that was opened and has returned at time 0.

    Event-loop time in seconds; `fields` override those of `Returned`.
    """
    return Returned(
        **{"round": a_round(), "since": 0.0, "opened_at": 0.0, "result_key": "r", **fields}
    )


def an_entry(event: JournalEvent, **fields: Any) -> JournalEntry:
    """Return a journal entry of `event` by a0; `fields` override those of `JournalEntry`."""
    usual: dict[str, Any] = {"run_id": RUN_ID, "author": an_agent_id(0), "event": event}
    return JournalEntry(**{**usual, **fields})


def fold_events(*events: JournalEvent, view: JournalView | None = None) -> View:
    """Return the view after these events, applied to `view`, by default an empty journal.

    Each event takes the next journal slot, as an entry written by a0. Without a `view` of a run the
    first event must be `FitStarted`.
    """
    after = view or JournalView()
    for event in events:
        after = fold(after, an_entry(event))
    assert isinstance(after, View), "the first event must be FitStarted"
    return after


# --- ManualClock ----------------------------------------------------------------------------------


class ManualClock:
    """A `core.clock.Clock` whose time advances only by `wait()`, which returns at once."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the virtual time in seconds; it starts at the constructor's `now`."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Advance the virtual time by `seconds` and return at once.

        Raises `ValueError` for negative values.
        """
        if seconds < 0:
            raise ValueError(f"cannot wait for {seconds} s: the duration is negative")
        self._now += seconds
