"""What the parts of a leader share: its collaborators and its observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from spotfit.agent.ports import AgentTransport, BackendHookRunner, CallbackRunner, NodeServices
from spotfit.agent.report_matching import ReportSink
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.model.leader_state import LeaderState


@dataclass(frozen=True, slots=True)
class LeaderServices:
    """The collaborators of a leader; the agent provides them when it is elected."""

    journal_writer: JournalWriter
    transport: AgentTransport
    reconciler: Reconciler
    settler: GroupSettler
    node_services: NodeServices
    report_sink: ReportSink
    callback_runner: CallbackRunner | None
    backend_hook_runner: BackendHookRunner | None
    releases_on_agent_exit: bool
    """Whether the backend releases a machine when its agent exits."""


class Observations:
    """The leader state of one term, and whether it has changed since the last decision."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.is_decision_due = True
        """Whether an event may have changed what the policies decide."""

    def record(self, **changes: Any) -> None:
        """Change fields of the leader's state because of an event, and request a new decision.

        Without `changes`, only the decision is requested: the event has changed another input of
        it, such as the journal or the roster.
        """
        if changes:
            self.state = replace(self.state, **changes)
        self.is_decision_due = True
