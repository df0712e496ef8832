"""`Agent`: the agent of one node, as a step machine over the interfaces of `ports`.

`tick(now)` processes all events, acts on them and returns the time of the next call. It never
blocks, reads no clock and starts no thread; calls to the bucket and the cloud are background calls.
`driver` calls it in real time, the simulator in virtual time.

Its parts are `RoundParticipant` (the workers of this node), `LeaderConnection` (the connection to
the leader), `JournalPoller` (when to read the journal, and for how long it could not),
`NodeValidation` (validations on this node), `NodeFeeder` (feeders on this node), `NodeNotice` (its
preemption notice) and, only while this agent is the elected leader, `Leader`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, assert_never

from msgspec.structs import replace

from spotfit.agent.leader import Leader
from spotfit.agent.leader_connection import LeaderConnection
from spotfit.agent.leader_context import LeaderServices
from spotfit.agent.node_feeder import NodeFeeder
from spotfit.agent.notices.sources import NodeNotice
from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    AgentTransport,
    LeaderDisconnected,
    LeaderMessageReceived,
    NodeServices,
    NoticeSource,
    TransportEvent,
    WorkerPool,
)
from spotfit.agent.report_matching import ReportSink
from spotfit.agent.round_participant import RoundParticipant
from spotfit.agent.standby import StandbyReporter
from spotfit.agent.validations import NodeValidation
from spotfit.control.background_calls import RetryingCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import (
    JournalError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.host import log
from spotfit.ledger.journal import Ledger
from spotfit.model.events import JournalEntry, LeaderElected
from spotfit.model.group import Unreachable
from spotfit.model.spec import RunSpec, RunTiming
from spotfit.model.topology import Member, StandbyReport
from spotfit.model.view import View
from spotfit.policy import capacity, preemption, time_budget
from spotfit.policy.election import leadership_claim
from spotfit.protocol.agent_leader import (
    AbortRound,
    ConnectionHeartbeat,
    DumpStacks,
    FromLeader,
    Join,
    JoinRejected,
    JournalEntryCopy,
    LeaderToWorker,
)
from spotfit.provision.api import Provisioner
from spotfit.provision.launch import AgentLaunchSpec

# --- Journal polling ------------------------------------------------------------------------------


# Before the run is known and after the leader was lost: an election should take milliseconds.
FAST_POLL_S = 0.05
_FAST_POLL_DURATION_S = 3.0
# An agent that cannot read the run at all exits after this time, and two of them end the run. A
# machine that has read it waits much longer (`orphan_timeout_s`), because it has something to lose.
# NFS clients may hide a new directory for some seconds, and a role or its metadata service may not
# be ready when the machine is.
_FIRST_READ_TIMEOUT_S = 30.0
# For errors that no waiting cures, such as another region or a missing bucket.
_PERMANENT_ERROR_TIMEOUT_S = 5.0
# Lower bound on the leader's poll interval, whatever the run's timing.
_LEADER_POLL_S = 0.1


class StartFailure(NamedTuple):
    """Why an agent exits that has never joined the run."""

    what: Unreachable
    reason: str


class JournalPoller:
    """The reads of one agent. `writer` performs them, together with the writes of a leader.

    `now` and returned times are event-loop seconds.
    """

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.polled_at = float("-inf")
        """When the last read was requested."""
        self._fast_poll_until = 0.0
        self._started_at = float("inf")
        self._store_error: StoreError | None = None
        """The last error of the store, until a read succeeds: each error is logged once."""

    @property
    def timing(self) -> RunTiming:
        """Intervals and timeouts of the run for this agent: poll, heartbeat, lease, orphan timeout.

        From the journal as it was last read; the defaults before the first read.
        """
        view = self._writer.ledger.journal_view
        return view.spec.timing if isinstance(view, View) else RunTiming()

    @property
    def last_contact_at(self) -> float:
        """Event-loop time in seconds of the last read of the journal, else of the first `poll`.

        Infinity before the first `poll`. The agent exits if that is more than `orphan_timeout_s`
        ago while it is not connected to a leader.
        """
        # A machine may boot while the bucket is unavailable: count from its start at the earliest.
        return max(self._started_at, self._writer.last_read_at)

    def poll(self, now: float, *, is_leading: bool, is_connected: bool) -> None:
        """Request a read of the journal if one is due, and advance the writer; called at each tick.

        Does not block: reads and writes are background calls. Errors of the store are logged and
        never stop the agent; only `orphan_timeout_s` without any contact does. Raises
        `JournalError` if an entry cannot be decoded.
        """
        self._started_at = min(self._started_at, now)
        if now >= self.next_poll_at(now, is_leading=is_leading, is_connected=is_connected):
            self.polled_at = now
            self._writer.request_read()
        try:
            self._writer.advance(now)
            if self._writer.last_read_at == now:
                self._store_error = None
        except StoreError as error:
            is_known = self._store_error is not None and self._store_error.message == error.message
            self._store_error = error
            if not is_known:
                log.warning("store.error", reason=error.message)

    def next_poll_at(self, now: float, *, is_leading: bool, is_connected: bool) -> float:
        """Event-loop time in seconds of the next read; in the past if one is overdue.

        Agents that receive entries from the leader (`is_connected`) read rarely, others often.
        """
        interval_s = self.timing.journal_poll_interval_s
        if not isinstance(self._writer.ledger.journal_view, View):
            return self.polled_at + FAST_POLL_S
        if now < self._fast_poll_until:
            # Scaled with the run's interval: the requests of 1,000 agents add up in the bucket.
            return self.polled_at + max(FAST_POLL_S, interval_s / 5)
        if is_leading:
            # Other processes write entries only to cancel the run or to elect another leader.
            return self.polled_at + max(_LEADER_POLL_S, interval_s)
        return self.polled_at + (self.timing.lease_timeout_s if is_connected else interval_s)

    def start_failure(self, now: float) -> StartFailure | None:
        """Return why this machine cannot serve the run; None if it can, or may soon.

        Called while no journal was read. After 30 s of errors of the store, or 5 s of an error that
        no waiting cures; and after 30 s in which the store was readable and had no journal of the
        run: `fit()` has written its first entry before it requested the machine. None while no
        call of the store has failed: it may only be slow.
        """
        ledger, error = self._writer.ledger, self._store_error
        was_read = self._writer.last_read_at >= self._started_at
        if was_read:
            if now - self._started_at < _FIRST_READ_TIMEOUT_S or ledger.journal_view.next_slot:
                return None
            reason = f"{ledger.store.url} has no journal of the run, as this machine opens it"
            return StartFailure(Unreachable.RUN, reason)
        if error is None:
            return None
        # Missing credentials are of both kinds: a role may appear late, but an outage it is not.
        is_refused = isinstance(error, StorePermissionError) or not isinstance(
            error, TransientStoreError
        )
        may_recover = isinstance(error, (StorePermissionError, TransientStoreError))
        timeout_s = _FIRST_READ_TIMEOUT_S if may_recover else _PERMANENT_ERROR_TIMEOUT_S
        if now - self._started_at <= timeout_s:
            return None
        reason = (
            f"the run in {ledger.store.url} was not readable within {timeout_s:.0f} s: "
            f"{error.message}"
        )
        return StartFailure(Unreachable.ACCESS if is_refused else Unreachable.STORAGE, reason)

    def start_fast_polling(self, now: float) -> None:
        """Read the journal at the next `poll`, and often for 3 s, because a new entry is likely.

        Called when the leader was lost or has rejected this agent.
        """
        self._fast_poll_until = now + _FAST_POLL_DURATION_S
        self.polled_at = float("-inf")


# An agent that left the run still stores what it holds: the bucket is usually reachable. Part of
# `policy.capacity.SELF_EXIT_TIMEOUT_S`, after which the leader releases its machine.
_ABANDONED_WRITES_S = 3.0

# While workers are being stopped or results written, check for completion ten times a second.
_SHUTDOWN_POLL_S = 0.1
# Killed processes end within milliseconds, or seconds if they have to free hundreds of gigabytes.
# One that waits in the kernel for a file server or an accelerator never ends, and one that a fork
# server which does not respond was to start never begins. The end of the machine ends both.
_MAX_STOP_S = 30.0


class Agent:
    """One agent, from the start to the exit of its process."""

    def __init__(
        self,
        *,
        member: Member,
        ledger: Ledger,
        transport: AgentTransport,
        worker_pool: WorkerPool,
        notice_sources: Sequence[NoticeSource],
        launch: AgentLaunchSpec,
        node_services: NodeServices,
        scratch: str = "",
    ) -> None:
        self._member = member
        self._ledger = ledger
        self._journal_writer = JournalWriter(ledger, node_services.journal_background_calls())
        self._journal_poller = JournalPoller(self._journal_writer)
        self._retrying_calls = RetryingCalls(node_services.background_calls())
        self._transport = transport
        self._worker_pool = worker_pool
        self._node_notice = NodeNotice(notice_sources)
        self._launch = launch
        self._node_services = node_services
        self._round_participant = RoundParticipant(
            agent_id=ledger.agent_id,
            worker_pool=worker_pool,
            transport=transport,
            store=ledger.store,
            node_services=node_services,
            launch=launch,
            devices=member.devices,
            scratch=scratch,
        )
        validator = node_services.open_validator()
        self._validation = NodeValidation(ledger.agent_id, transport, validator)
        self._feeder = NodeFeeder(member.token, transport, node_services.open_feeder_node())
        journal_calls = node_services.journal_background_calls()
        self._leader_connection = LeaderConnection(transport, ledger, journal_calls)
        self._standby_reporter = StandbyReporter(ledger, journal_calls)
        self._leader: Leader | None = None
        self._report_sink = ReportSink(ledger, node_services.background_calls())
        self._write_until = math.inf
        """Until when the exit waits for writes to the bucket."""
        self._stop_until: float | None = None
        """Until when the exit waits for the end of processes; None before the exit."""
        self._is_prepared = False
        self._is_registered = False
        self._now = 0.0
        self.is_abandoned = False
        """Whether the agent exits because the journal does not (or no longer) list this node."""
        self.has_processes_left = False
        """Whether the agent exits although workers or a validation have not ended."""
        self.start_failure: StartFailure | None = None
        """Why the agent exits without ever having joined the run; None otherwise."""
        self.is_drained = False
        """Whether the agent exits because the preemption deadline has passed."""
        self.is_replaced = False
        """Whether it then has a replacement, so that its backend need not restart the machine."""
        ledger.set_entry_listener(self._on_journal_entry)

    # --- one tick ----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Process events and act; return when to call again, in event-loop seconds, or None.

        None means that the agent has finished; `is_abandoned` and `is_drained` then give the
        reason. Call it earlier if an event arrives. `now` must not decrease.
        """
        self._now = now
        self._round_participant.poll_worker_events(now)
        self._validation.poll(now)
        for event in self._transport.drain_events():
            self._on_transport_event(event)
        is_connected = self._leader_connection.address is not None
        for report in self._node_notice.poll(now, is_connected=is_connected):
            self._transport.send_to_leader(report)
        self._journal_poller.poll(
            now, is_leading=self._leader is not None, is_connected=is_connected
        )
        view = self._ledger.journal_view
        if not isinstance(view, View):
            self.start_failure = self._journal_poller.start_failure(now)
            must_exit = self.start_failure is not None or self._is_orphaned()
            return self._shut_down(now) if must_exit else now + FAST_POLL_S
        self._prepare(view.spec)
        self._apply_view()
        if self._should_exit():
            return self._shut_down(now)
        # An upper bound: states that no event reports, such as a finished import, are polled.
        wake_times = [now + 1.0, self._check_leadership()]
        if self._stands_by:
            wake_times.append(self._stand_by(now))
        else:
            self._maintain_leader_connection(now)
            if self._leader or self._leader_connection.leader_observation(now).is_connected:
                self._standby_reporter.withdraw(now)
        if self._leader is not None:
            wake_times.append(self._leader.tick(now))
            # The tick may have opened or closed a round: act on it now, not in the next tick.
            self._apply_view()
        elif self._report_sink.has_unwritten:
            # Of a term that has ended: a node that leaves may not have the time later.
            self._report_sink.flush(now, force=True)
        return max(now, min([*wake_times, *self._component_wakes(now)]))

    def _component_wakes(self, now: float) -> Iterator[float]:
        if self._node_notice.notice is not None and self._node_notice.deadline > now:
            margin_s = preemption.exit_margin_s(self._node_notice.notice)
            deadline = self._node_notice.deadline
            yield deadline - margin_s if deadline - margin_s > now else deadline
        yield self._journal_poller.next_poll_at(
            now,
            is_leading=self._leader is not None,
            is_connected=self._leader_connection.address is not None,
        )
        yield self._journal_writer.wake_at
        if not self._stands_by:
            yield self._leader_connection.wake_at
        yield self._validation.wake_at

    def _apply_view(self) -> None:
        """Bring the workers and the validation of this node in line with the journal."""
        self._round_participant.apply_view(self._ledger.view, self._leader_connection.address)
        self._validation.apply_view(self._ledger.view, self._now)
        self._feeder.apply_view(self._ledger.view, self._now)

    def _prepare(self, spec: RunSpec) -> None:
        """Once the run is known, prepare its workers and publish this agent's member entry."""
        if not self._is_prepared:
            # Long before the first round: unpacking code and importing torch take many seconds.
            self._is_prepared = True
            self._worker_pool.prepare(spec)
        if not self._is_registered:
            publish = partial(self._ledger.publish_member, self._member)
            self._is_registered = self._retrying_calls.run("member", publish, self._now) is not None

    def _on_journal_entry(self, slot: int, body: bytes, entry: JournalEntry) -> None:
        if self._leader is not None:
            self._leader.on_journal_entry(slot, body, entry, self._now)

    # --- messages ----------------------------------------------------------------------------

    def _on_transport_event(self, event: TransportEvent) -> None:
        match event:
            case LeaderMessageReceived(message=message):
                self._on_leader_message(message)
            case LeaderDisconnected():
                if self._leader_connection.on_disconnected(event, self._now):
                    # Without its leader the round cannot continue: collectives would block.
                    self._round_participant.stop_workers()
                    self._journal_poller.start_fast_polling(self._now)
            case AgentMessageReceived() | AgentDisconnected() if self._leader is not None:
                self._leader.on_agent_event(event, self._now)
            case AgentMessageReceived(agent=agent):
                # The agent has not read the entry of the latest election yet: it must retry.
                self._transport.send_to_agent(agent, JoinRejected(reason="not_leading"))
                self._transport.disconnect_agent(agent)
            case AgentDisconnected():
                return
            case _:
                assert_never(event)

    def _on_leader_message(self, message: FromLeader) -> None:
        self._leader_connection.on_message(self._now)
        match message:
            case JournalEntryCopy(slot=slot, body=body):
                self._apply_entry_copy(slot, body)
            case AbortRound(round=number):
                self._round_participant.abort_round(number)
            case DumpStacks(round=number, dump_id=dump_id):
                self._round_participant.dump_stacks(number, dump_id)
            case LeaderToWorker(round=number, rank=rank, frame=frame):
                self._round_participant.forward_to_workers(number, rank, frame, self._ledger.view)
            case ConnectionHeartbeat():
                return
            case JoinRejected():
                self._leader_connection.on_rejected(self._now)
                self._journal_poller.start_fast_polling(self._now)

    def _apply_entry_copy(self, slot: int, body: bytes) -> None:
        try:
            self._journal_writer.apply_entry(slot, body)
        except JournalError as error:
            # Only the bucket is authoritative: if the entry there is damaged, the read raises.
            log.warning("journal.copy_rejected", slot=slot, reason=error.message)
            self._journal_poller.start_fast_polling(self._now)

    def _maintain_leader_connection(self, now: float) -> None:
        view, participant = self._ledger.view, self._round_participant
        is_warm = self._worker_pool.is_warm
        join = Join(
            run_id=self._ledger.run_id,
            member=self._member,
            next_slot=view.next_slot,
            running_round=participant.round if participant.has_workers else None,
            notice=self._node_notice.notice,
            is_warm=is_warm,
            last_entered_round=participant.last_entered_round,
            uploading_round=participant.uploading_round,
            node_failure=participant.node_failure,
            snapshot_shards=participant.snapshot_shards,
        )
        is_reconnected = self._leader_connection.connect(
            view, join, self._journal_poller.timing, now
        )
        if self._leader_connection.address is not None:
            self._validation.send_report(is_reconnected=is_reconnected)
            self._feeder.send_report(is_reconnected=is_reconnected)
        if is_warm:
            self._leader_connection.report_warm()
        if self._leader_connection.check_heartbeat(
            self._journal_poller.timing, now, is_leading=self._leader is not None
        ):
            # Treated like a lost connection: the round cannot continue without its leader.
            self._round_participant.stop_workers()
            self._journal_poller.start_fast_polling(self._now)

    @property
    def _stands_by(self) -> bool:
        """Whether this machine waits for the run to change to its network."""
        return self._leader is None and self._ledger.view.stands_by(self._member.token)

    def _stand_by(self, now: float) -> float:
        """Report to the leader through the storage; return when to call again."""
        if self._leader_connection.address is not None:
            # The run has changed to another network.
            self._leader_connection.disconnect()
            self._round_participant.stop_workers()
        group = self._ledger.view.groups.get(self._member.token)
        if group is None or group.role != "train":
            return math.inf
        failure = self._round_participant.node_failure
        report = StandbyReport(
            member=self._member,
            renewal=0,
            is_warm=self._worker_pool.is_warm,
            has_notice=self._node_notice.notice is not None,
            failure=failure.message if failure is not None else "",
        )
        interval_s = self._journal_poller.timing.lease_interval_s
        return self._standby_reporter.report(report, interval_s, now)

    # --- leadership --------------------------------------------------------------------------

    def _check_leadership(self) -> float:
        """Lead if this agent is elected, or claim the leadership if the leader is lost.

        Returns when a claim becomes due; infinity without one.
        """
        now, view, agent_id = self._now, self._ledger.view, self._ledger.agent_id
        if view.is_leader(agent_id):
            # The epoch differs if this agent lost and regained the leadership between two ticks.
            if self._leader is None or self._leader.epoch != view.epoch:
                self._become_leader()
            return math.inf
        if self._leader is not None:
            self._leader = None
            # The new leader starts the callback and hook processes on its own node.
            self._node_services.stop_sidecars()
        connection = self._leader_connection
        connection.observe_leader(
            view, self._journal_poller.timing, now, read_lease=self._journal_poller.polled_at == now
        )
        claim = leadership_claim(
            view, agent_id, connection.leader_observation(now), stands_by=self._stands_by
        )
        # A machine of an earlier fit exits in the next tick.
        if claim is None or self._member.token not in view.groups:
            return math.inf
        if not claim.is_due(now):
            # After that time the claim waits for a read of the lease, whose end wakes the loop.
            return claim.not_before if now < claim.not_before else math.inf
        # While an entry is being written the view may be outdated: claim after its slot is known.
        if self._journal_writer.is_settled:
            # Several agents may claim: the one whose entry gets the next slot of the journal wins.
            elected = LeaderElected(
                leader=agent_id,
                epoch=view.epoch + 1,
                coordinator_address=self._transport.address,
                reason=claim.reason,
                lost_leader=claim.lost_leader,
                network=view.network_of(self._member.token),
            )
            self._journal_writer.write(elected, now)
            connection.reset_observation()
            if self._ledger.view.is_leader(agent_id):
                self._become_leader()
        return math.inf

    def _become_leader(self) -> None:
        spec = self._ledger.view.spec
        node_services = self._node_services
        provisioner = node_services.open_provisioner(spec)
        reconciler = Reconciler(
            self._journal_writer,
            provisioner,
            self._launch,
            node_services.background_calls(),
            node_services.new_token,
        )
        self._leader_connection.disconnect()  # the next connection goes to this agent itself
        services = LeaderServices(
            journal_writer=self._journal_writer,
            transport=self._transport,
            reconciler=reconciler,
            settler=GroupSettler(
                self._journal_writer,
                partial(_open_backend, node_services, spec),
                self._launch,
                node_services.background_calls(),
            ),
            node_services=node_services,
            report_sink=self._report_sink,
            callback_runner=node_services.open_callback_runner(spec),
            backend_hook_runner=node_services.open_backend_hook_runner(spec),
            releases_on_agent_exit=provisioner.traits.releases_on_agent_exit,
        )
        self._leader = Leader(services, now=self._now)

    # --- exit --------------------------------------------------------------------------------

    def _should_exit(self) -> bool:
        if self.is_abandoned:
            return True  # also if the storage has returned meanwhile: the workers were stopped
        view = self._ledger.view
        group = view.groups.get(self._member.token)
        # The journal may not list this machine as part of the run: a leader that was replaced
        # rented it late, or the backend restarted it after its replacement. No process would
        # release it, so the agent exits by itself.
        is_unknown = (
            view.fit_end is None
            and self._leader is None
            and (
                self._journal_writer.is_settled
                if group is None
                else not group.is_node_active(self._member.node)
            )
        )
        # Before the fit's end is checked: such an agent has nothing to finish.
        is_overdue = time_budget.is_overdue(view, self._journal_writer.elapsed_s(self._now))
        is_lost = self._ledger.agent_id in view.lost_agents
        if is_unknown or is_lost or is_overdue or self._is_orphaned():
            self.is_abandoned = True
            return True
        # With an assignment, the leader has received its `Join`; the answer may be on the way.
        is_assigned = view.round is not None and view.round.assignment_of(self._ledger.agent_id)
        may_join = self._leader is None and not self._stands_by
        if may_join and view.fit_end is None and not is_assigned:
            reason = self._leader_connection.unreachable_leader(
                self._journal_poller.timing, self._now
            )
            self.start_failure = StartFailure(Unreachable.LEADER, reason) if reason else None
            if self.start_failure is not None:
                return True
        if self._must_leave(view):
            self.is_drained = True
            return True
        if view.fit_end is not None:
            return self._leader is None or self._leader.is_finished
        if view.pending_fit_end is None or view.is_leader(self._ledger.agent_id):
            return False
        # Training has ended: an agent without a part in the remaining validations is not needed.
        validation = view.current_validation
        is_validating = validation is not None and validation.agent == self._ledger.agent_id
        return group is not None and group.role == "train" and not is_validating

    def _must_leave(self, view: View) -> bool:
        """Whether the preemption deadline has passed, or is near and this node is replaced."""
        notice = self._node_notice.notice
        # Its workers may still save a checkpoint.
        if notice is None or view.fit_end is not None or self._round_participant.has_workers:
            return False
        deadline = self._node_notice.deadline
        if self._now < deadline - preemption.exit_margin_s(notice):
            return False
        self.is_replaced = capacity.is_replaced(view, self._member.token, self._member.node)
        return self.is_replaced or self._now >= deadline

    def _is_orphaned(self) -> bool:
        """Whether for `orphan_timeout_s` the journal was missing, or nothing was reached.

        Neither the leader nor the bucket.
        """
        timeout_s = self._journal_poller.timing.orphan_timeout_s
        if self._journal_writer.missing_s > timeout_s:
            return True
        silent_s = self._now - self._journal_poller.last_contact_at
        return self._leader_connection.address is None and silent_s > timeout_s

    def _shut_down(self, now: float) -> float | None:
        """Stop workers, finish writes, and return None once nothing is left to do."""
        self._feeder.stop()
        if self._stop_until is None:
            self._stop_until = now + _MAX_STOP_S
        if self._round_participant.has_workers or self._validation.is_busy:
            self._round_participant.stop_workers()
            self._validation.stop()
            if now < self._stop_until:
                return now + _SHUTDOWN_POLL_S
            self.has_processes_left = True
            log.error("agent.processes_left", reason=f"not ended within {_MAX_STOP_S:.0f} s")
            return None
        if self.is_abandoned and self._write_until == math.inf:
            self._write_until = now if self._is_orphaned() else now + _ABANDONED_WRITES_S
        if self._report_sink.has_unwritten and now < self._write_until:
            # Reports of a term in which this agent led and which ended before the run did.
            self._report_sink.flush(now, force=True)
            return now + _SHUTDOWN_POLL_S
        if self._round_participant.has_pending_writes and now < self._write_until:
            return now + _SHUTDOWN_POLL_S
        # Still connected: the driver uploads the last log lines before it closes the transport. The
        # leader releases the machine of an agent that disconnects after the end of the run.
        return None


def _open_backend(
    node_services: NodeServices, spec: RunSpec, provisioner: str, options: dict[str, Any]
) -> Provisioner:
    """Open the backend of an earlier fit of the run."""
    return node_services.open_provisioner(
        replace(spec, provisioner=provisioner, provisioner_options=options)
    )
