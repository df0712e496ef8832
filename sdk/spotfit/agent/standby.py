"""Agents that stand by in another network than the leader's, until the run changes to theirs.

They cannot connect to the leader, so both sides use the storage: each agent renews a
`StandbyReport` (`StandbyReporter`), and the leader reads those of machines that run without a
connection (`StandbyWatch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.core.ids import AgentId, Token
from spotfit.ledger.journal import Ledger
from spotfit.model.leader_state import StandbyStatus
from spotfit.model.topology import StandbyReport
from spotfit.policy.election import LeaderObservation, after_lease_read

# Short against the time that the last machine of a network needs to boot. Each read takes one
# request per group and agent. Requests may wait for hours: without any agent, the listings of a
# group cost 0.04 USD per day.
_READ_INTERVAL_S = 2.0
_IDLE_READ_INTERVAL_S = 10.0
# Short against the lease timeout, after which a report counts as outdated.
_RETRY_DELAY_S = 0.1


class StandbyReporter:
    """Writes the reports of one agent. `now` and returned times are event-loop seconds."""

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self._ledger = ledger
        self._background_calls = background_calls
        self._retrying_calls = RetryingCalls(background_calls)
        self._token: Token | None = None
        """The group of this machine, while the storage may have its report."""
        self._renewal = 0
        self._written: StandbyReport | None = None
        self._writing: StandbyReport | None = None
        self._due_at = -math.inf

    def report(self, report: StandbyReport, interval_s: float, now: float) -> float:
        """Write the report if it has changed, or was written `interval_s` ago; do not block.

        Its `renewal` is set here. Returns when to call again; the end of a write wakes the loop.
        """
        self._token = report.member.token
        if self._writing is None:
            is_changed = self._written is None or report != replace(self._written, renewal=0)
            if not is_changed and now < self._due_at:
                return self._due_at
            self._renewal += 1
            self._writing = replace(report, renewal=self._renewal)
        return self._due_at if self._finish_write(interval_s, now) else math.inf

    def withdraw(self, now: float) -> None:
        """Delete the report of an agent that has joined the run; nothing to do without one.

        Called at each tick; does not block. A leader that finds an old report would wait for the
        agent, also if its machine is lost later.
        """
        if self._token is None or (self._writing is not None and not self._finish_write(0.0, now)):
            return
        delete = partial(self._ledger.withdraw_standby, self._token)
        if self._retrying_calls.run("standby withdrawal", delete, now) is not None:
            self._token = self._written = None

    def _finish_write(self, interval_s: float, now: float) -> bool:
        """Start the write, or collect its result; return whether it has ended."""
        assert self._writing is not None
        publish = partial(self._ledger.publish_standby, self._writing)
        result = self._background_calls.run("standby report", publish)
        if result is None:
            return False
        if result.error is None:
            self._written = self._writing
        self._writing = None
        self._due_at = now + (interval_s if result.error is None else _RETRY_DELAY_S)
        return True


class _Observed(NamedTuple):
    """One agent as the leader has observed it."""

    report: StandbyReport
    renewal: LeaderObservation
    """When the report was last renewed; an agent is observed like a leader by its lease."""
    is_proven: bool


class StandbyWatch:
    """The reports as one leader reads them. `now` and returned times are event-loop seconds."""

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls, now: float) -> None:
        self._ledger = ledger
        self._background_calls = background_calls
        self._is_reading = False
        self._tokens: list[Token] = []
        self._due_at = now
        self._observed: dict[AgentId, _Observed] = {}
        self.statuses: dict[AgentId, StandbyStatus] = {}
        """The agents that have renewed their reports within the timeout. Replaced, not changed."""

    def read(self, find_groups: Callable[[], list[Token]], timeout_s: float, now: float) -> bool:
        """Start a read if one is due, or collect its result; return whether `statuses` has changed.

        Called at each tick; does not block. `find_groups` returns the groups with machines that run
        without a connection; `timeout_s` is that of the leader's lease.
        """
        if not self._is_reading:
            if now < self._due_at:
                return False
            self._tokens = find_groups()
        result = None
        if self._tokens:
            read = partial(self._ledger.read_standby, self._tokens)
            result = self._background_calls.run("standby reports", read)
            self._is_reading = result is None
            if result is None:
                return False
        self._due_at = now + (_READ_INTERVAL_S if self._observed else _IDLE_READ_INTERVAL_S)
        # A read that failed says nothing about the agents: the bucket may be unavailable.
        if result is not None and result.error is not None:
            return False
        known, self._observed = self._observed, {}
        for report in result.value if result is not None else ():
            agent = report.member.agent
            self._observed[agent] = _observe(known.get(agent), report, now)
        if self._observed:
            self._due_at = now + _READ_INTERVAL_S
        before, self.statuses = self.statuses, self._current(timeout_s, now)
        return _without_renewals(before) != _without_renewals(self.statuses)

    def next_wake(self) -> float:
        """Event-loop time in seconds of the next read; infinity during one, whose end wakes it."""
        return math.inf if self._is_reading else self._due_at

    def _current(self, timeout_s: float, now: float) -> dict[AgentId, StandbyStatus]:
        return {
            agent: StandbyStatus(report=one.report, is_proven=one.is_proven)
            for agent, one in self._observed.items()
            if now - one.renewal.lease_changed_at <= timeout_s
        }


def _observe(known: _Observed | None, report: StandbyReport, now: float) -> _Observed:
    if known is None:
        renewal = LeaderObservation(lease_changed_at=now, lease_read_at=now)
        return _Observed(report, renewal, is_proven=False)
    # A lower number is an older object that was written again.
    has_changed = report.renewal > known.report.renewal
    # The time in which the storage could not be read does not count as missing renewals.
    renewal = after_lease_read(known.renewal, now, has_changed=has_changed)
    newest = report if has_changed else known.report
    return _Observed(newest, renewal, is_proven=known.is_proven or has_changed)


def _without_renewals(statuses: dict[AgentId, StandbyStatus]) -> dict[AgentId, StandbyStatus]:
    return {
        agent: replace(status, report=replace(status.report, renewal=0))
        for agent, status in statuses.items()
    }
