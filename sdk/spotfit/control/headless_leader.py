"""The leader in a process without a node of its own: the client that called `fit()`, or a sweep.

A headless leader has no round coordinator and no connected agents. It requests the first machines
of a run, replaces them if all are lost, and releases machines that a finished run has left. While
an agent is the leader, it only monitors that agent's lease and, through the backend, the machines.

    state       | event                                          | next
    ------------|------------------------------------------------|------------
    monitoring  | a claim is due (`policy.election`), and won    | leading
    leading     | another process is elected                     | monitoring
    any         | fit ended and all machines are released        | done
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.clock import Clock
from spotfit.core.errors import JournalError
from spotfit.host import log
from spotfit.model.events import LeaderElected
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.view import JournalView, View
from spotfit.policy.election import LeaderObservation, after_lease_read, leadership_claim

# Interval of reading the leader's lease: less than `election._MAX_READ_GAP_S`, so that no gap in
# the observation counts as an unreachable bucket.
_LEASE_POLL_S = 1.0
UNSUPERVISED_TEXT = "this process does not replace lost machines of the run"
"""Of the warning `run.unsupervised`."""


class HeadlessLeader:
    """A state machine driven by `tick(now)`; see the table in the module docstring.

    Exists in a driver process (`fit()`, `spotfit.attach`, a sweep) for one run. `now` is always
    that process's `Clock.now()` in seconds. Its calls block: no agent is connected to it that would
    have to wait.
    """

    def __init__(
        self,
        journal_writer: JournalWriter,
        reconciler: Reconciler,
        settler: GroupSettler,
        now: float,
    ) -> None:
        self._journal_writer = journal_writer
        self._ledger = ledger = journal_writer.ledger
        self._reconciler = reconciler
        self._settler = settler
        # The backend of `reconciler`: that of the fit for which this process supervises the run.
        self._backend = _backend_of(ledger.journal_view)
        self._is_outdated = False
        self._state = LeaderState(
            agent_id=ledger.agent_id,
            is_headless=True,
            requeues_itself=reconciler.requeues_itself,
            leading_since=now,
            phase=NoRound(since=now),
        )
        self._observation = LeaderObservation(lease_changed_at=now)
        self._lease_counter = 0
        self._observed_leader: str | None = None
        self._next_renewal_at = now
        self._next_poll_at = now
        self._end_handled = False

    @property
    def view(self) -> View:
        """The state of the run as of the last `tick`; reads nothing.

        Raises `AssertionError` if the journal has no `FitStarted` entry.
        """
        return self._journal_writer.view

    @property
    def answered_at(self) -> float:
        """When a backend last answered a call for a request whose outcome is unknown.

        Of calls after the end of a fit, in seconds of the clock of `tick`; -inf before the first.
        """
        return max(self._reconciler.answered_at, self._settler.answered_at)

    def tick(self, now: float) -> float | None:
        """Read the journal, claim the leadership if it is due, and act while leading.

        Returns the time of the next call, in seconds of the same clock as `now`, or None once the
        run has ended, its machines are released, and the settler waits for nothing. An earlier call
        is harmless. Blocks during calls of the bucket and the cloud. Raises `StoreError`, after
        which it may be called again, and `JournalError`, also if the journal is missing for
        `orphan_timeout_s`.
        """
        self._check_is_present(now)  # first: reads of a deleted bucket raise another error
        self._journal_writer.request_read()
        self._journal_writer.advance(now)
        view = self._ledger.journal_view
        # The run's first entry is not written yet.
        if not isinstance(view, View):
            return now + _LEASE_POLL_S
        if view.fit_end is not None and not self._end_handled:
            self._end_handled = True
            # Restart the lease timeout: the leader gets time to release its machines itself.
            self._state = replace(self._state, phase=NoRound(since=now))
            self._observation = LeaderObservation(lease_changed_at=now)
        wake = self._supervise(view, now)
        # Afterwards: machines of this fit do not wait for those of earlier ones. Also while an
        # agent leads: its machine may not be able to use the backend of an earlier fit.
        self._settler.settle(now)
        if wake is None and not self._settler.is_waiting:
            return None
        return min(now + _LEASE_POLL_S if wake is None else wake, self._settler.wake_at(now))

    def _check_is_present(self, now: float) -> None:
        """Raise `JournalError` if the journal is missing for as long as agents tolerate it."""
        if self._journal_writer.missing_since is None:
            return
        view, missing_s = self.view, self._journal_writer.missing_s
        if missing_s > view.spec.timing.orphan_timeout_s:
            raise JournalError(
                f"The journal of the run {view.spec.name!r} is missing in {self._ledger.store.url} "
                f"for {missing_s:.0f} s: it was deleted or replaced while the run was "
                "active. Agents exit by themselves.",
                do="Check with the tools of the backend that no machine is left. Call fit() again "
                "to train from the beginning. Cancel a run before its directory is deleted.",
            )

    def _supervise(self, view: View, now: float) -> float | None:
        if view.fit_end is not None and all(group.is_closed for group in view.groups.values()):
            return None
        if self._is_of_other_backend(view):
            return now + _LEASE_POLL_S
        if not view.is_leader(self._ledger.agent_id):
            return self._monitor_leader(view, now)
        return self._reconcile(view, now)

    def _is_of_other_backend(self, view: View) -> bool:
        """Whether a later `fit()` continues the run with another backend than the reconciler's."""
        if self._backend is None:
            self._backend = _backend_of(view)
        is_other = self._backend != _backend_of(view)
        if is_other and not self._is_outdated:
            reason = f"a later fit() continues it with provisioner {view.spec.provisioner!r}"
            log.warning("run.unsupervised", text=UNSUPERVISED_TEXT, reason=reason)
        self._is_outdated = is_other
        return is_other

    def _monitor_leader(self, view: View, now: float) -> float | None:
        leader = view.leader.leader if view.leader else None
        # After an election the observation is of the previous leader, so read the lease at once.
        if leader != self._observed_leader or now >= self._next_poll_at:
            self._next_poll_at = now + _LEASE_POLL_S
            self._observe_leader(view, now)
        claim = leadership_claim(view, self._ledger.agent_id, self._observation, headless=True)
        if claim is None or not claim.is_due(now):
            if claim is not None and now < claim.not_before:
                return min(claim.not_before, self._next_poll_at)
            return self._next_poll_at
        if not self._journal_writer.is_settled:
            return self._journal_writer.wake_at
        elected = LeaderElected(
            leader=self._ledger.agent_id,
            epoch=view.epoch + 1,
            coordinator_address=None,
            reason=claim.reason,
        )
        self._journal_writer.write(elected, now)
        after = self._journal_writer.view
        if not after.is_leader(self._ledger.agent_id):
            return now
        if view.fit_end is not None:
            self._reconciler.note_pause()  # see `_observe_leader`
        return self._reconcile(after, now)

    def _observe_leader(self, view: View, now: float) -> None:
        """Read the leader's lease, and check whether the backend still reports its machines."""
        leader = view.leader.leader if view.leader else None
        if leader != self._observed_leader:
            self._observed_leader, self._lease_counter = leader, 0
            self._observation = LeaderObservation(lease_changed_at=now)
            self._next_poll_at = now
        if leader is None:
            return
        lease = self._ledger.read_lease(leader)
        has_changed = lease > self._lease_counter
        observation = LeaderObservation(lease_changed_at=now) if has_changed else self._observation
        self._observation = after_lease_read(observation, now, has_changed=has_changed)
        self._lease_counter = max(self._lease_counter, lease)
        # Without any machine the leading agent is gone, which is found sooner than by its lease. A
        # headless leader needs no machine, so that nothing follows for it.
        if view.fit_end is not None or not view.leader or not view.leader.coordinator_address:
            return
        self._reconciler.observe(now, every_s=view.spec.timing.observe_interval_s)
        if self._observation.vanished_at is None and self._reconciler.all_groups_terminated:
            self._observation = replace(self._observation, vanished_at=now)

    def _reconcile(self, view: View, now: float) -> float | None:
        # Renew first: the calls below may block for longer than a lease interval.
        if now >= self._next_renewal_at:
            self._next_renewal_at = now + view.spec.timing.lease_interval_s
            if self._journal_writer.missing_since is None:
                self._ledger.renew_lease()
        self._reconciler.observe(now, every_s=view.spec.timing.observe_interval_s)
        # An action is valid only for the view it was decided from, so decide again after each one.
        must_repeat, until = True, now
        while (
            must_repeat
            and self._journal_writer.is_settled
            and self._journal_writer.view.is_leader(self._ledger.agent_id)
        ):
            self._state = replace(
                self._state,
                group_statuses=self._reconciler.group_statuses,
                status_as_of=self._reconciler.status_as_of,
                granted_at=self._reconciler.granted_at,
                reported_running=self._reconciler.reported_running,
                refused_at=self._reconciler.refused_at,
            )
            must_repeat, wait = self._reconciler.reconcile(self._state, now)
            until = wait.until
        if self._reconciler.is_idle:
            return None
        if not self._journal_writer.is_settled:
            until = self._journal_writer.wake_at
        return max(
            now, min(until, self._next_renewal_at, now + view.spec.timing.journal_poll_interval_s)
        )


def _backend_of(view: JournalView) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(view, View):
        return None
    return view.spec.provisioner, view.spec.provisioner_options


def sweep(leader: HeadlessLeader, clock: Clock, *, duration_s: float) -> View:
    """Supervise a run for up to `duration_s` seconds and return its last view.

    For `spotfit sweep`, for example in a cron job. Blocks, calling `leader.tick` and `clock.wait`.
    Returns early once the run has ended and all machines are released. If machines are left,
    detecting a lost leader takes `RunTiming.lease_timeout_s`: a shorter duration may never claim
    the leadership. Raises `StoreError` and `JournalError`.
    """
    deadline = clock.now() + duration_s
    while (now := clock.now()) < deadline:
        wake = leader.tick(now)
        if wake is None:
            break
        clock.wait(max(0.0, min(wake, deadline) - now))
    return leader.view
