"""`Leader`: what an agent does while it is the elected leader of the run.

It keeps the roster of connected agents, coordinates the open round, and decides with the reconciler
what to append to the journal. None of its state is persisted: a new leader restores it from the
journal, the bucket and the `Join` messages of the agents.

Each part of its state has an owner: `Roster` the connected agents, `RoundLifecycle` the rounds and
their workers, `CheckpointGarbageCollector` the deletions, `Observations` the input of decisions.

Renewal of the leader's lease.

The lease is an object in the bucket whose contents change with every renewal. Other agents elect a
new leader if it does not change for `RunTiming.lease_timeout_s` of their own clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.feeder_directory import FeederDirectory
from spotfit.agent.leader_context import LeaderServices, Observations
from spotfit.agent.ports import AgentDisconnected, AgentMessageReceived
from spotfit.agent.roster import Roster, find_invalid_field
from spotfit.agent.round_lifecycle import OpenRound, RoundLifecycle
from spotfit.agent.standby import StandbyWatch
from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.ids import AgentId, Token
from spotfit.host import log
from spotfit.ledger import journal
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    GroupsReleased,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    NodeLost,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.leader_state import LeaderState, UserCodeError, ValidationReported
from spotfit.model.view import View
from spotfit.policy import scheduler
from spotfit.policy.election import CLEANUP_LEASE_TIMEOUT_S
from spotfit.policy.feeder_schedule import feeder_addresses
from spotfit.policy.preemption import is_growth_due, is_move_ready, is_replacement_ready
from spotfit.protocol.agent_leader import (
    ConnectionHeartbeat,
    FeederReady,
    Join,
    JoinRejected,
    JournalEntryCopy,
    NodeUnusable,
    NodeWarm,
    NoticeReceived,
    PreemptionRiskReported,
    ToLeader,
    UploadsDrained,
)
from spotfit.protocol.framing import MAX_FRAME_BYTES
from spotfit.protocol.worker_agent import SuggestSave, ValidationFinished

# --- Renewal of the leader's lease ----------------------------------------------------------------


# Short against the lease timeout (20 s): the other agents count the time since the last renewal.
_RETRY_DELAY_S = 0.1


class Lease:
    """Renews the lease of one term of leadership: the object `.spotfit/leases/<agent>`.

    `now` and returned times are event-loop seconds.
    """

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls, now: float) -> None:
        self._ledger = ledger
        self._background_calls = background_calls
        self._next_renewal_at = now
        self._is_renewing = False

    def renew_soon(self, now: float) -> None:
        """Make a renewal due at `now`; the next `renew_if_due` starts it.

        Called when the fit has ended: from then on headless leaders claim the leadership after the
        shorter `CLEANUP_LEASE_TIMEOUT_S`.
        """
        self._next_renewal_at = now

    def renew_if_due(self, interval_s: float, now: float) -> None:
        """Start a background renewal if one is due, and record the result of the one in progress.

        Called at each tick; does not block. The next one is due after `interval_s` seconds, or 0.1
        s after a failure, which is not reported otherwise.
        """
        # During a renewal its result is collected, however early that is.
        if not self._is_renewing and now < self._next_renewal_at:
            return
        result = self._background_calls.run("lease", self._ledger.renew_lease)
        self._is_renewing = result is None
        if result is not None:
            self._next_renewal_at = now + (interval_s if result.error is None else _RETRY_DELAY_S)

    def next_wake(self) -> float:
        """Event-loop time in seconds of the next renewal.

        `math.inf` during a renewal, whose end wakes the event loop.
        """
        return math.inf if self._is_renewing else self._next_renewal_at


# While a background call is pending, ask for its result ten times a second.
_RECHECK_INTERVAL_S = 0.1
# A run with all agents connected observes its groups less often: cloud APIs limit requests.
_IDLE_OBSERVE_FACTOR = 10
# Half of the largest frame: the body is sent as base64.
_MAX_ENTRY_COPY_BYTES = MAX_FRAME_BYTES // 2
# Four renewals fit into the timeout, so that a single failed one never costs the leadership.
_CLEANUP_LEASE_INTERVAL_S = CLEANUP_LEASE_TIMEOUT_S / 4


class Leader:
    """One term of leadership of this agent.

    `on_agent_event` processes messages, `on_journal_entry` entries, and `tick` acts on both. All
    are called by the agent's event loop with its time `now` in seconds; none blocks.
    """

    def __init__(self, services: LeaderServices, *, now: float) -> None:
        self._services = services
        self._ledger = ledger = services.journal_writer.ledger
        self.epoch = ledger.view.epoch
        self._has_ended = False
        """Whether an entry with another leader was applied: this term is over."""
        self._roster = Roster(ledger.agent_id, services.transport)
        self._observations = Observations(
            LeaderState(
                agent_id=ledger.agent_id,
                releases_on_agent_exit=services.releases_on_agent_exit,
                requeues_itself=services.reconciler.requeues_itself,
                leading_since=now,
                validation_changed_at=now,
            )
        )
        self._checkpoint_gc = CheckpointGarbageCollector(
            ledger.store,
            services.node_services.background_calls(),
            lambda: ledger.view.is_leader(ledger.agent_id),
        )
        self._rounds = RoundLifecycle(
            services,
            roster=self._roster,
            observations=self._observations,
            checkpoint_gc=self._checkpoint_gc,
            now=now,
        )
        journal_calls = services.node_services.journal_background_calls()
        self._lease = Lease(ledger, journal_calls, now)
        self._standby = StandbyWatch(ledger, journal_calls, now)
        self._feeders = FeederDirectory()
        self._latest_entry_copy: JournalEntryCopy | None = None
        self._heartbeat_at = now
        self._wait_until = now
        """When the policies must decide again although nothing was observed."""
        last_round = ledger.view.last_round
        self._former_agents = {
            (one.token, one.node): one.agent
            for one in (last_round.assignments if last_round is not None else ())
        }
        if ledger.view.round is not None:
            # The coordinator of the previous leader is gone, and with it the state of collectives.
            self._rounds.fail(now)

    @property
    def is_finished(self) -> bool:
        """Whether all machines are released; the policy has waited for what must be written before.

        After the end of the fit the agent exits once this is True.
        """
        return self._services.reconciler.is_idle

    @property
    def _has_unfinished_writes(self) -> bool:
        callbacks = self._rounds.callbacks
        return (
            self._services.report_sink.has_unwritten
            or self._checkpoint_gc.is_busy
            or (callbacks is not None and callbacks.has_unwritten)
        )

    # --- messages of agents ------------------------------------------------------------------

    def on_agent_event(self, event: AgentMessageReceived | AgentDisconnected, now: float) -> None:
        """Process a message or the disconnection of any agent, the leader's own included.

        An agent that has sent no `Join` to this leader is disconnected, so that it reconnects with
        one.
        """
        match event:
            case AgentDisconnected(agent=agent):
                self._on_agent_disconnected(agent, now)
            case AgentMessageReceived(agent=agent, message=Join() as join):
                self._on_join(agent, join, now)
            case AgentMessageReceived(agent=agent, message=message):
                if self._roster.touch(agent, now) is None:
                    # Its state is unknown without a `Join`, which it sends when it reconnects.
                    self._services.transport.disconnect_agent(agent)
                else:
                    self._on_message(agent, message, now)

    def _on_message(self, agent: AgentId, message: ToLeader, now: float) -> None:
        match message:
            case PreemptionRiskReported(reason=reason):
                # No policy depends on a risk: its only effect is an earlier save.
                if self._rounds.open_round is not None:
                    self._rounds.open_round.send_to_workers([(None, SuggestSave(reason=reason))])
                return
            case ConnectionHeartbeat() | Join():
                return
            case UploadsDrained(round=number):
                self._roster.mark_uploads_drained(agent, number)
            case NoticeReceived(notice=notice):
                self._roster.record_notice(agent, notice, now)
            case NodeWarm():
                self._roster.mark_warm(agent)
            case FeederReady(feeder=feeder):
                self._roster.record_feeder(agent, feeder, now)
            case NodeUnusable(failure=failure):
                self._roster.mark_unusable(agent, failure)
            case ValidationReported(attempt=attempt):
                current = self._ledger.view.current_validation
                if current is None or current.agent != agent:
                    return
                # An agent repeats its last report after it has reconnected.
                known = self._observations.state.validation_reported
                if known is not None and attempt < known.attempt:
                    return
                self._observations.record(validation_reported=message)
            case _:
                self._rounds.on_message(agent, message, now)
                return
        self._observations.record()

    def _on_join(self, agent: AgentId, join: Join, now: float) -> None:
        if join.run_id != self._ledger.run_id:
            self._services.transport.send_to_agent(agent, JoinRejected(reason="other_run"))
            self._services.transport.disconnect_agent(agent)
            return
        if reason := find_invalid_field(join):
            log.warning("join.rejected", agent=agent, reason=reason)
            self._services.transport.disconnect_agent(agent)
            return
        # A second connection: messages on the first one may have been lost.
        self._on_agent_disconnected(agent, now)
        self._roster.join(agent, join, now)
        # An entry after the agent's next slot makes it read the missing ones at once.
        if self._latest_entry_copy is not None and join.next_slot < self._ledger.view.next_slot:
            self._services.transport.send_to_agent(agent, self._latest_entry_copy)
        self._rounds.on_agent_joined(agent, join, now)
        self._observations.record()

    def _on_agent_disconnected(self, agent: AgentId, now: float) -> None:
        if self._roster.mark_disconnected(agent, now):
            # The backend may report why the machine is gone: the loss is charged to that cause.
            self._services.reconciler.observe_soon()
            self._observations.record()
            self._rounds.on_agent_disconnected(agent, now)

    # --- entries of the journal --------------------------------------------------------------

    def on_journal_entry(self, slot: int, body: bytes, entry: JournalEntry, now: float) -> None:
        """Process an entry of any author after it was applied to the view; send it to all agents.

        `slot` is its number in the journal, `body` its encoded form. Called once per entry, in
        order.
        """
        # Larger entries, for example with many long tracebacks, are read from the bucket.
        is_sent = len(body) <= _MAX_ENTRY_COPY_BYTES
        self._latest_entry_copy = JournalEntryCopy(slot=slot, body=body) if is_sent else None
        self._observations.record()
        if self._latest_entry_copy is not None:
            # Sent first: an agent needs the entry to process the messages that follow from it.
            self._roster.broadcast(self._latest_entry_copy)
        view = self._ledger.view
        # The cached view spares later readers the replay of the whole journal.
        if journal.is_cache_due(view):
            cached = self._ledger.cached_view()
            self._services.node_services.background_calls().send(
                "view cache", lambda: journal.write_cached_view(self._ledger.store, cached)
            )
        # Entries of later leaders may follow in the same read. They are no concern of this term,
        # which has delivered its reports.
        if not self._has_ended:
            self._apply_event(entry.event, view, now)

    def _apply_event(self, event: JournalEvent, view: View, now: float) -> None:
        rounds = self._rounds
        match event:
            case RoundOpened(round=opened):
                rounds.open(opened, now)
            case RoundClosed():
                rounds.close(event, now)
            case TrainingEnded():
                rounds.end_training(now)
            case FitEnded():
                rounds.end_fit(now)
                # Before the next decision, which releases this machine unless a search is pending.
                self._checkpoint_gc.scan_for_undeleted(view)
                self._lease.renew_soon(now)
            case CheckpointCommitted():
                rounds.on_checkpoint_committed(event, now)
                # The first checkpoint to validate starts the timeout for a validation machine.
                if event.validation is not None and len(view.unvalidated_checkpoints) == 1:
                    self._observations.record(validation_changed_at=now)
            case CheckpointDropped(name=name):
                self._checkpoint_gc.schedule_deletion(name)
            case LeaderElected():
                self._has_ended = True
                rounds.end_term()
            case CancelRequested(save=True, reason=reason):
                if rounds.open_round is not None:
                    rounds.open_round.request_final_save(reason, now)
            case PreemptionNoticed():
                if rounds.open_round is not None:
                    rounds.open_round.announce_preemption(view, self._observations.state, now)
            case NodeLost(token=token, node=node, agent=agent):
                self._roster.forget(token, node, agent, now=now)
                self._restart_validation_timeout((token,), now)
            case GroupsReleased(token=token, other_tokens=others):
                self._restart_validation_timeout((token, *others), now)
            case ValidationStarted():
                self._observations.record(validation_changed_at=now)
            case ValidationEnded(checkpoint_name=name):
                self._observations.record(validation_changed_at=now)
                if rounds.open_round is not None:
                    finished = ValidationFinished(checkpoint_name=name)
                    rounds.open_round.send_to_workers([(None, finished)])

    def _restart_validation_timeout(self, lost_groups: Sequence[Token], now: float) -> None:
        """Restart the timeout for a validation machine if such a machine was lost."""
        groups = self._ledger.view.groups
        if any(token in groups and groups[token].role == "validate" for token in lost_groups):
            self._observations.record(validation_changed_at=now)

    def _flush_reports(self, view: View, now: float) -> None:
        sink, awaits_report_sink = self._services.report_sink, self._rounds.awaits_report_sink
        sink.flush(now, force=view.fit_end is not None or awaits_report_sink)
        if awaits_report_sink and not self._rounds.awaits_report_sink:
            self._observations.record()

    # --- tick --------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do everything that is due at `now`; return when to call again, in event-loop seconds.

        That covers lease, heartbeats, checkpoints, reports, timeouts and decisions. Call it earlier
        if an event arrives.
        """
        view, observations = self._ledger.view, self._observations
        self._maintain_liveness(view, now)
        self._advance_checkpoints(view, now)
        self._rounds.deliver_reports()
        self._rounds.advance_callbacks(view, now)
        if self._user_code_error() is not None:
            observations.record()
        self._flush_reports(view, now)
        self._rounds.check_timeouts(view, now)
        if view.spec.feeders is not None and self._rounds.open_round is not None:
            self._send_feeders(self._rounds.open_round, view, now)
        reconciler = self._services.reconciler
        if view.spec.cost.chooses_offers and self._standby.read(
            self._unconnected_groups, view.spec.timing.lease_timeout_s, now
        ):
            observations.record()
        is_complete = view.round is not None and not (
            self._roster.disconnected_since or self._standby.statuses
        )
        factor = _IDLE_OBSERVE_FACTOR if is_complete else 1
        reconciler.observe(now, every_s=view.spec.timing.observe_interval_s * factor)
        state = observations.state
        if (
            reconciler.group_statuses is not state.group_statuses
            or now >= self._wait_until
            or (state.has_unfinished_writes and not self._has_unfinished_writes)
            # While an agent is missing, the fact that its machine still runs matters, too.
            or (
                self._rounds.failing_since is not None
                and reconciler.status_as_of is not state.status_as_of
            )
        ):
            observations.record()
        if observations.is_decision_due:
            self._decide_and_act(now)
        if view.is_leader(self._ledger.agent_id):
            self._services.settler.settle(now)
        return self._next_wake(now)

    def _unconnected_groups(self) -> list[Token]:
        """The groups for workers with a machine whose agent may stand by, or has until now."""
        view, running = self._ledger.view, self._services.reconciler.granted_at
        connected = {(one.member.token, one.member.node) for one in self._roster.members.values()}
        return [
            token
            for token, group in view.groups.items()
            if group.role == "train"
            and group.handle is not None
            and any(
                # What a backend reports may be older than the machine.
                ((token, node) in running or view.stands_by(token))
                and (token, node) not in connected
                for node in group.active_nodes
            )
        ]

    def _send_feeders(self, open_round: OpenRound, view: View, now: float) -> None:
        """Send the workers where feeders are, and take how long they have waited for rows."""
        feeders = feeder_addresses(view, self._refresh_state(now))
        frames = self._feeders.update(open_round.coordinator, feeders, now)
        open_round.send_to_workers(frames)

    def _maintain_liveness(self, view: View, now: float) -> None:
        """Renew the lease, send heartbeats, and disconnect agents that send none."""
        timing = view.spec.timing
        # A renewal would create the directory of a journal that is missing.
        if self._services.journal_writer.missing_since is None:
            self._lease.renew_if_due(
                _CLEANUP_LEASE_INTERVAL_S if view.fit_end else timing.lease_interval_s, now
            )
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + timing.heartbeat_interval_s
            # A frozen machine keeps its TCP connection open: only missing messages reveal it.
            for agent in self._roster.find_unresponsive(timing.heartbeat_timeout_s, now):
                self._services.transport.disconnect_agent(agent)
                self._on_agent_disconnected(agent, now)
            self._roster.send_heartbeats()

    def _advance_checkpoints(self, view: View, now: float) -> None:
        """Search for uncommitted checkpoints between two rounds, and delete dropped ones."""
        open_round = self._rounds.open_round
        if (
            not self._rounds.is_bucket_searched
            and view.round is None
            and view.fit_end is None
            # Uploads that are still in progress may complete a further checkpoint.
            and scheduler.wait_for_uploads(view, self._refresh_state(now), now) is None
        ):
            self._rounds.search_bucket(view, now)
        if open_round is not None:
            open_round.record_assigned_names()
        # No further round is opened that would search for the remains of earlier ones.
        if view.pending_fit_end is not None or view.fit_end is not None:
            self._checkpoint_gc.scan_for_undeleted(view)
        uncommitted = open_round.coordinator.reports.uncommitted_names if open_round else ()
        self._checkpoint_gc.advance(view, uncommitted, now, self._rounds.parent_checkpoints)

    def _decide_and_act(self, now: float) -> None:
        """Decide until nothing is due.

        Nothing is decided while an entry is being written: a decision holds only for the view that
        it was made from.
        """
        view, open_round = self._ledger.view, self._rounds.open_round
        # Workers are informed once that only their save is missing before the change of machines.
        if (
            view.notices
            and open_round is not None
            and open_round.replacement_ready_at is None
            and is_replacement_ready(view, self._refresh_state(now))
        ):
            open_round.announce_preemption(view, self._observations.state, now)
        if open_round is not None and is_move_ready(view, self._refresh_state(now)):
            open_round.suggest_save("machines of another offer are ready", now)
        elif open_round is not None and is_growth_due(view, self._observations.state, now):
            open_round.suggest_save("machines for more workers are ready", now)
        writer, has_acted = self._services.journal_writer, True
        while (
            has_acted and writer.is_settled and self._ledger.view.is_leader(self._ledger.agent_id)
        ):
            has_acted, wait = self._services.reconciler.reconcile(self._refresh_state(now), now)
            self._wait_until = wait.until
        self._observations.is_decision_due = not writer.is_settled

    def _refresh_state(self, now: float) -> LeaderState:
        """Update and return the facts that decisions are based on."""
        view, roster, reconciler = self._ledger.view, self._roster, self._services.reconciler
        # Not `record`: these facts change with events that have requested the decision.
        self._observations.state = replace(
            self._observations.state,
            **self._rounds.observed_facts(view),
            members=roster.members,
            disconnected_since=roster.disconnected_since,
            disconnected_in_round=roster.disconnected_in_round,
            notice_received_at=roster.noticed_at,
            last_agent_by_node={**former, **roster.last_agent_by_node}
            if (former := self._agents_of_former_network())
            else roster.last_agent_by_node,
            standby={
                agent: status
                for agent, status in self._standby.statuses.items()
                if agent not in roster.members
            },
            loss_recorded_at=roster.loss_recorded_at,
            agent_lost_at=roster.agent_lost_at,
            feeding_since=roster.feeding_since,
            has_unfinished_writes=self._has_unfinished_writes,
            has_unwritten_logs=self._services.node_services.has_unwritten_logs,
            group_statuses=reconciler.group_statuses,
            status_as_of=reconciler.status_as_of,
            granted_at=reconciler.granted_at,
            reported_running=reconciler.reported_running,
            refused_at=reconciler.refused_at,
            user_code_error=self._user_code_error(),
        )
        if view.spec.feeders is not None:
            state = self._observations.state
            feeders = feeder_addresses(view, state)
            self._observations.state = replace(
                state,
                data_wait_share=self._feeders.wait_share(feeders, now),
                data_wait_measured_s=self._feeders.measured_s(feeders, now),
            )
        return self._observations.state

    def _agents_of_former_network(self) -> dict[tuple[Token, int], AgentId]:
        """The agents of the last round before this term that cannot connect to this leader."""
        view = self._ledger.view
        if not view.former_network:
            return {}
        return {
            (token, node): agent
            for (token, node), agent in self._former_agents.items()
            if view.stands_by(token)
        }

    def _user_code_error(self) -> UserCodeError | None:
        """Return the exception of the user's callbacks, else of the hooks, else None."""
        errors = (
            runner.user_code_error()
            for runner in (self._services.callback_runner, self._services.backend_hook_runner)
            if runner is not None
        )
        return next(filter(None, errors), None)

    def _next_wake(self, now: float) -> float:
        wakes = [self._heartbeat_at, self._services.settler.wake_at(now)]
        if self._services.journal_writer.missing_since is None:
            wakes.append(self._lease.next_wake())
        # Without it the tick follows the end of the write, which wakes the event loop.
        if self._services.journal_writer.is_settled:
            wakes.append(self._wait_until)
        if self._ledger.view.spec.cost.chooses_offers:
            wakes.append(self._standby.next_wake())
        if self._rounds.open_round is not None:
            wakes.append(self._rounds.open_round.next_wake(now))
        if (
            not self._rounds.is_bucket_searched
            or self._checkpoint_gc.is_busy
            or self._has_unfinished_writes
        ):
            wakes.append(now + _RECHECK_INTERVAL_S)
        return min(wakes)
