"""The settler: releases groups of earlier fits with the backends that they were requested from.

A fit that ends while a backend does not answer leaves groups of machines that may still cost money
(`View.unsettled_groups`). The next fit of the run may use another backend, whose machines usually
have neither the client library nor the credentials of the earlier one. Therefore every process that
supervises the run tries to release them, the driver first; releasing is idempotent.

After the end of a fit the settler also records when its released machines have ended
(`control.machine_ends`).

    state of the group  | event                                     | next
    --------------------|-------------------------------------------|------------------------
    unsettled           | the backend has received the release      | released
    released            | the backend reports that it has ended     | `GroupsReleased` appended
    released            | `_END_WAIT_S` without an end              | `GroupsReleased` appended
    unsettled           | the backend has no group of that token    | `GroupRefused` appended
    unsettled           | the backend cannot be opened or asked     | asked again later
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotfit.control.background_calls import BackgroundCalls, BackgroundResult
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.machine_ends import EndRecorder
from spotfit.control.machine_times import MachineTimesRecorder
from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.events import GroupRefused, GroupsReleased, JournalEvent
from spotfit.model.group import GroupStatus
from spotfit.model.view import UnsettledGroup, View
from spotfit.provision.api import Provisioner, Traits, find_group
from spotfit.provision.launch import AgentLaunchSpec

# A finished background call wakes an agent's event loop; a driver polls.
_PENDING_CALL_POLL_S = 0.1

# A missing package or credential does not appear by itself, a network connection may.
_MIN_RETRY_DELAY_S = 2.0
_MAX_RETRY_DELAY_S = 300.0

# Interval of look-ups of a group that its backend may list late.
_LOOK_UP_INTERVAL_S = 5.0

# The record of the release has the times of its machines; nothing else waits for it.
_END_WAIT_S, _END_POLL_S = 20.0, 2.0

_NEVER = float("inf")


class GroupSettler:
    """Settles the unsettled groups of one run, one after the other, for one process.

    Also for a process that does not lead: no decision depends on these groups. `now` is that
    process's `Clock.now()` in seconds. The machines of the running fit never wait for it, if
    `background_calls` run in threads.
    """

    def __init__(
        self,
        journal_writer: JournalWriter,
        open_provisioner: Callable[[str, dict[str, Any]], Provisioner],
        launch: AgentLaunchSpec,
        background_calls: BackgroundCalls,
    ) -> None:
        """`open_provisioner` opens a backend by the name and options of a spec."""
        self._journal_writer = journal_writer
        self._open_provisioner = open_provisioner
        self._launch = launch
        self._background_calls = background_calls
        self._in_flight: Token | None = None
        self._outcomes: dict[Token, JournalEvent] = {}
        """Known outcomes that the journal may not contain yet."""
        # Of this process only: another one may have the credentials that this one lacks.
        self._failures: dict[Token, int] = {}
        self._absent_since: dict[Token, float] = {}
        """When each group was first looked up without being found."""
        self.answered_at = -_NEVER
        """When a backend last answered a call for one of the groups."""
        self._retry_at: dict[Token, float] = {}
        self._released_at: dict[Token, float] = {}
        self._times = MachineTimesRecorder()
        self._called_ms = 0
        self._end_recorder = EndRecorder(journal_writer, open_provisioner, background_calls)
        self._now = 0.0

    def settle(self, now: float) -> None:
        """Start or collect the call for one group, and append an outcome; call it in every tick.

        Never raises an error of a backend: the first one of each group is logged, and the group is
        asked for again after 2 s, later up to 300 s.
        """
        self._now = now
        view = self._journal_writer.ledger.journal_view
        if not isinstance(view, View):
            return
        self._end_recorder.observe(now)
        self._advance_call(view, now)
        outcome = next(
            (self._outcomes[t] for t in view.unsettled_groups if t in self._outcomes), None
        )
        if outcome is not None and self._journal_writer.is_settled:
            self._journal_writer.write(outcome, now)

    def wake_at(self, now: float) -> float:
        """When `settle` must be called again, in seconds of `Clock.now()`; `math.inf` for never."""
        view = self._journal_writer.ledger.journal_view
        if self._in_flight is not None or self._outcomes.keys() & view.unsettled_groups.keys():
            return now + _PENDING_CALL_POLL_S
        retry_at = (self._retry_at.get(token, now) for token in view.unsettled_groups)
        return min(*retry_at, self._end_recorder.wake_at(now), _NEVER)

    @property
    def is_waiting(self) -> bool:
        """Whether a group is unsettled for which no call of this process has failed yet.

        Or the end of a machine with a known price is not recorded, see `EndRecorder.is_waiting`.
        """
        unsettled = self._journal_writer.ledger.journal_view.unsettled_groups
        is_settling = any(token not in self._failures for token in unsettled)
        return is_settling or self._end_recorder.is_waiting(self._now)

    def _advance_call(self, view: View, now: float) -> None:
        token = self._in_flight or self._next_token(view, now)
        if token is None:
            return
        if self._in_flight is None:
            self._called_ms = self._journal_writer.ledger.wall_ms()
        # Another process may have settled the group meanwhile; the result is collected anyway.
        group = view.unsettled_groups.get(token)
        release = partial(self._release, group) if group is not None else lambda: None
        result = self._background_calls.run(f"settle {token}", release)
        self._in_flight = token if result is None else None
        if result is not None and group is not None:
            self._on_result(token, group, result, now)

    def _next_token(self, view: View, now: float) -> Token | None:
        due = (
            token
            for token in view.unsettled_groups
            if token not in self._outcomes and now >= self._retry_at.get(token, now)
        )
        return next(due, None)

    def _release(self, unsettled: UnsettledGroup) -> _Release:
        """Cancel the group at its own backend, if the backend knows it, and observe it."""
        provisioner = self._open_provisioner(unsettled.provisioner, unsettled.provisioner_options)
        group = unsettled.group
        handle = group.handle or find_group(provisioner, group.plan, self._launch)
        if handle is None:
            return _Release(provisioner.traits, is_known=False)
        provisioner.cancel(handle)
        try:
            return _Release(provisioner.traits, status=provisioner.observe(handle))
        except Exception as error:  # noqa: BLE001  # each client library has its own errors
            log.info("machines.end_unknown", token=group.plan.token, reason=str(error))
            return _Release(provisioner.traits)

    def _on_result(
        self, token: Token, group: UnsettledGroup, result: BackgroundResult, now: float
    ) -> None:
        if result.error is not None:
            failures = self._failures[token] = self._failures.get(token, 0) + 1
            self._retry_at[token] = now + exponential_backoff_s(
                failures - 1, shortest_s=_MIN_RETRY_DELAY_S, longest_s=_MAX_RETRY_DELAY_S
            )
            if failures == 1:
                _warn_about(token, group, result.error)
            return
        self.answered_at = now
        release: _Release = result.value
        if release.is_known:
            self._on_release(token, release, now)
        elif now < self._absent_since.setdefault(token, now) + release.traits.read_lag_s:
            self._retry_at[token] = now + _LOOK_UP_INTERVAL_S
        else:
            reason = f"{group.provisioner} has no machines for it; an earlier fit left it open"
            self._outcomes[token] = GroupRefused(token=token, reason=reason)

    def _on_release(self, token: Token, release: _Release, now: float) -> None:
        """Record the release, once its machines have ended or after some time."""
        status, released_at = release.status, self._released_at.setdefault(token, now)
        usage = self._journal_writer.ledger.journal_view.usage
        if status is not None:
            self._times.observe(
                token,
                status,
                release.traits,
                usage,
                called_ms=self._called_ms,
                now_ms=self._journal_writer.ledger.wall_ms(),
            )
            if not status.is_terminated and now < released_at + _END_WAIT_S:
                self._retry_at[token] = now + _END_POLL_S
                return
        released = GroupsReleased(token=token)
        self._outcomes[token] = self._times.with_release_times(usage, released)


@dataclass(frozen=True, slots=True)
class _Release:
    """The answer of a backend to a release."""

    traits: Traits
    is_known: bool = True
    """False if the backend has no group of the token, or does not list it yet."""
    status: GroupStatus | None = None
    """Its status after the release; None if the backend has not reported it."""


def _warn_about(token: Token, group: UnsettledGroup, error: Exception) -> None:
    reason = (
        error.message if isinstance(error, SpotfitError) else f"{type(error).__name__}: {error}"
    )
    # The run continues: it does not depend on these machines.
    log.warning(
        "group.unsettled",
        token=token,
        provisioner=group.provisioner,
        text="machines of an earlier fit of this run may still cost money",
        reason=reason,
        do=f"run `spotfit sweep` where {group.provisioner} can be used, or look there for machines "
        "with this token",
    )
