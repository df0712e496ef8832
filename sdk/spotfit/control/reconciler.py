"""The reconciler: observes the provisioner and executes one decision of the scheduler at a time.

Machines are requested in three steps, so that a new leader can complete a request and no machine is
paid twice (docs/decisions/0006): `GroupPlanned` is appended with a new token, the provisioner's
`submit` (idempotent on the token) is called, and `GroupSubmitted` or `GroupRefused` is appended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from msgspec.structs import replace

from spotfit.control.background_calls import BackgroundCalls, BackgroundResult, RetryingCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.machine_times import MachineTimesRecorder
from spotfit.control.price_watch import PriceWatch
from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.errors import ConfigError, MissingExtraError, ProvisionError, SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.events import (
    AgentCrash,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    NodeLost,
)
from spotfit.model.group import (
    GroupHandle,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
    Role,
    Unreachable,
    find_node_status,
)
from spotfit.model.leader_state import LeaderState
from spotfit.model.spec import RunSpec
from spotfit.policy.actions import (
    AppendEvent,
    Idle,
    ReleaseGroups,
    RequestMachines,
    SubmitGroup,
    Wait,
)
from spotfit.policy.capacity import network_in_use, with_crash, with_unreachable
from spotfit.policy.scheduler import next_action
from spotfit.policy.time_budget import BACKEND_TIME_LIMIT_MARGIN_S
from spotfit.provision.api import Provisioner, Refusal, fetch_machine_output, find_group
from spotfit.provision.launch import AgentLaunchSpec, find_unreachable

# A finished background call wakes the leader (`ThreadedCalls`); polling is a safety net.
_PENDING_CALL_POLL_S = 0.05

# Backoff of `submit` calls with an unknown outcome, such as timeouts of a cloud API.
_MIN_RETRY_DELAY_S = 0.1
_MAX_RETRY_DELAY_S = 30.0
# The same for look-ups of a pending request after the end of the fit.
_MAX_LOOK_UP_DELAY_S = 5.0
# How long a request with an unknown outcome is repeated although the backend rejects it: as long as
# new requests after a round, see `capacity.final_refusal_reason`.
_MAX_REJECTED_S = 600.0

# Delay before failed cancel calls are repeated.
_RELEASE_RETRY_S = 2.0

# What a machine that starts no agent has printed last: enough for a traceback of Python.
_MAX_OUTPUT_LINES = 20
_MAX_OUTPUT_CHARS = 500  # per line
# Log services of clouds are some seconds behind: Docker's driver for CloudWatch sends lines every
# 5 s (https://docs.docker.com/engine/logging/drivers/awslogs/).
_OUTPUT_WAIT_S, _OUTPUT_POLL_S = 10.0, 3.0

# A machine exits after 30 s without the storage, and its backend reports that up to a minute
# later. An error of the storage here within this time may have the same cause.
_STORAGE_OUTAGE_S = 120.0

# Wait of an idle reconciler. Nothing changes any more; the caller normally exits before.
_IDLE_WAIT_S = 3600.0


class Reconciler:
    """Executes the leader's actions for one run, and observes its groups of machines.

    Used by the leading agent and by a headless leader in their event loop; `now` is that process's
    `Clock.now()` in seconds. It may be lost at any time: everything that a new leader needs is in
    the journal.
    """

    def __init__(
        self,
        journal_writer: JournalWriter,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        background_calls: BackgroundCalls,
        new_token: Callable[[], str],
    ) -> None:
        self._journal_writer = journal_writer
        self._provisioner = provisioner
        self._launch = launch
        self._background_calls = background_calls
        self._retrying_calls = RetryingCalls(background_calls)
        self._price_watch = PriceWatch(provisioner, background_calls)
        self._new_token = new_token
        self._observed_at: float | None = None
        self._observation_started_at = float("-inf")
        # Of its own: the time of a tick may be older than the call.
        self._observation_started_ms = 0
        self._unobserved: tuple[Token, ...] = ()
        """Groups whose `observe` calls of the current interval are in flight."""
        # The following attributes are copied to the `LeaderState` fields of the same names.
        self.group_statuses: dict[Token, GroupStatus] = {}
        self.status_as_of: dict[Token, float] = {}
        self.granted_at: dict[tuple[Token, int], float] = {}
        self.reported_running: frozenset[tuple[Token, int]] = frozenset()
        self.refused_at: dict[Role, float] = {}
        # Cancelled at the backend, but not recorded yet: one entry records all of one release.
        self._cancelled_groups: set[Token] = set()
        self.is_idle = False
        # In memory only: a new leader submits again at once, with the same token.
        self._submit_tries: dict[Token, int] = {}
        self._planned_tokens: set[Token] = set()
        """Groups that this process has planned: no other process has submitted them before."""
        self._retry_at: dict[Token, float] = {}
        self._rejected_since: dict[Token, float] = {}
        """When the last series of rejections of a request with an unknown outcome began."""
        self._output_awaited_since: dict[tuple[Token, int], float] = {}
        self._looked_up_at: dict[Token, float] = {}
        """When each pending group was first looked up since the end of the fit."""
        self.answered_at = -math.inf
        """When the backend last answered such a look-up."""
        self._submitted_tokens: set[Token] = set()
        """Groups for which this process has called `submit`."""
        # Of this process: the time of the submission is of another machine's clock.
        self._held_since: dict[Token, float] = {}
        """When this process submitted each group, or first observed it."""
        self._machine_times = MachineTimesRecorder()

    def reconcile(self, state: LeaderState, now: float) -> tuple[bool, Wait]:
        """Decide one action with `policy.scheduler.next_action` and execute it.

        Requires that the journal writer `is_settled`, and that this process is the leader. `state`
        is what it observes at `now`. Returns (True, wait) if an entry was offered to the journal,
        so that the caller decides again as soon as the writer is settled; otherwise (False, wait),
        where nothing is due before `wait.until` unless an event occurs.

        Calls of the provisioner are background calls, and their results are collected by a later
        call. Their errors are retried, or recorded as a refusal if they are final, and
        not raised. `is_idle` is True once nothing is left to do.
        """
        view = self._journal_writer.view
        state = replace(
            state,
            elapsed_s=self._journal_writer.elapsed_s(now),
            wall_ms=self._journal_writer.ledger.storage_ms(),
            listed_offers=self._price_watch.listed,
            unrecorded_times=self._machine_times.unrecorded(view.usage),
        )
        action = next_action(view, state, now)
        match action:
            case Wait():
                return False, action
            case Idle(reason=reason):
                if not self.is_idle:
                    self._warn_about_open_groups(reason)
                self.is_idle = True
                return False, Wait(now + _IDLE_WAIT_S, reason)
            case AppendEvent(event=NodeLost() as lost):
                return self._append_loss(lost, now)
            case AppendEvent(event=GroupsReleased() as released):
                self._append_release(released, now)
                return True, _no_wait(now)
            case AppendEvent(event=event):
                self._journal_writer.write(event, now)
                return True, _no_wait(now)
            case RequestMachines():
                self._plan_group(action, now)
                return True, _no_wait(now)
            case SubmitGroup(token=token):
                return self._submit_group(token, now)
            case ReleaseGroups(token=token, other_tokens=others):
                return self._release_groups((token, *others), now)
        assert_never(action)

    def observe(self, now: float, *, every_s: float) -> None:
        """Query the provisioner for the status of every group that is granted and not released.

        Call it in every tick: `every_s` seconds after the last queries, and once all of these were
        answered, it starts the next ones as background calls. It collects the results in
        `group_statuses`, `status_as_of`, `granted_at` and `reported_running`. A failed call leaves
        the previous status.
        """
        view = self._journal_writer.view
        if view.spec.cost.chooses_offers and view.fit_end is None:
            requests = list(self._price_requests(view.spec))
            self._price_watch.advance(requests, now, every_s=view.spec.timing.price_interval_s)
        held = self._held_groups() | self._ending_groups()
        for token in held:
            self._held_since.setdefault(token, now)
        # A new interval starts only after all calls of the last one were answered: a slow backend
        # must not accumulate calls.
        if not self._unobserved:
            if self._observed_at is not None and now - self._observed_at < every_s:
                return
            self._observed_at = self._observation_started_at = now
            self._observation_started_ms = self._journal_writer.ledger.wall_ms()
            self._unobserved = tuple(held)
            self._machine_times.retain(held)
        self._unobserved = tuple(
            token
            for token in self._unobserved
            if token in held and not self._observe_group(token, held[token], now)
        )

    @property
    def requeues_itself(self) -> bool:
        """Whether the backend restarts lost machines by itself, see `Traits.requeues_itself`."""
        return self._provisioner.traits.requeues_itself

    @property
    def all_groups_terminated(self) -> bool:
        """Whether machines were granted and the backend reports every one of them as terminated.

        False without groups, while a request is pending, and until every group was observed.
        """
        if any(group.is_pending for group in self._journal_writer.view.groups.values()):
            return False
        statuses = [self.group_statuses.get(token) for token in self._held_groups()]
        return bool(statuses) and all(status and status.is_terminated for status in statuses)

    def _held_groups(self) -> dict[Token, GroupHandle]:
        """The handles of groups that are granted and not released."""
        return {
            token: group.handle
            for token, group in self._journal_writer.view.groups.items()
            if group.handle is not None and not group.is_released
        }

    def _ending_groups(self) -> dict[Token, GroupHandle]:
        """The handles of released groups of this fit, of which the end is not recorded."""
        usage, now_ms = self._journal_writer.view.usage, self._journal_writer.ledger.wall_ms()
        return {
            token: group.handle
            for token, group in usage.ending_groups.items()
            if group.handle is not None
            and group.fit_count == usage.fit_count
            and now_ms <= (group.release_limit_ms or 0)
        }

    def _observe_group(self, token: Token, handle: GroupHandle, now: float) -> bool:
        """Return whether the backend has answered. A failed call is repeated next interval."""
        observe = partial(self._provisioner.observe, handle)
        result = self._background_calls.run(f"observe {token}", observe)
        if result is None or result.error is not None:
            return result is not None
        traits = self._provisioner.traits
        status = self._without_unlisted(token, result.value, traits.read_lag_s)
        self._record_machine_times(token, result.value, status)
        # Certain only for the time before the call, less the backend's own delay.
        as_of = self._observation_started_at - traits.status_lag_s
        self.status_as_of = {**self.status_as_of, token: as_of}
        previous = self.group_statuses.get(token)
        if status.refusal and (previous is None or previous.refusal != status.refusal):
            log.warning("group.waiting", token=token, reason=status.refusal)
        if previous != status:
            self.group_statuses = {**self.group_statuses, token: status}
        running = {
            (token, n) for n, one in enumerate(status.nodes) if one.state == NodeState.RUNNING
        }
        known = {
            one: at for one, at in self.granted_at.items() if one[0] != token or one in running
        }
        self.granted_at = dict.fromkeys(running, now) | known
        self.reported_running |= running
        return True

    def _record_machine_times(
        self, token: Token, reported: GroupStatus, status: GroupStatus
    ) -> None:
        pairs = enumerate(zip(reported.nodes, status.nodes, strict=True))
        self._machine_times.observe(
            token,
            reported,
            self._provisioner.traits,
            self._journal_writer.view.usage,
            called_ms=self._observation_started_ms,
            now_ms=self._journal_writer.ledger.wall_ms(),
            hidden=[node for node, (one, corrected) in pairs if one is not corrected],
        )

    def _without_unlisted(
        self, token: Token, status: GroupStatus, read_lag_s: float
    ) -> GroupStatus:
        """The status, in which machines that the backend may not list yet are not GONE."""
        age_s = self._observation_started_at - self._held_since[token]
        is_certain = age_s >= read_lag_s
        if is_certain or all(node.is_known for node in status.nodes):
            return status
        # What a read has shown may be missing in the next one, which another server answers.
        previous = self.group_statuses.get(token)
        shown = dict(enumerate(previous.nodes)) if previous is not None else {}
        waiting = NodeStatus(state=NodeState.WAITING)
        nodes = tuple(
            node if node.is_known else shown.get(index, waiting)
            for index, node in enumerate(status.nodes)
        )
        return replace(status, nodes=nodes)

    def note_pause(self) -> None:
        """Note that this process has not observed the machines for a while."""
        self._machine_times.note_pause()

    def observe_soon(self) -> None:
        """Let the next `observe` query the backend at once, without waiting for its interval.

        Called after a disconnect, whose reason the backend may know. Calls in flight are awaited
        first.
        """
        self._observed_at = None

    def _append_loss(self, lost: NodeLost, now: float) -> tuple[bool, Wait]:
        """Append a loss, once what the machine has left behind was looked up."""
        name = f"explain {lost.token}/{lost.node} {lost.agent}"
        result = self._retrying_calls.run(name, partial(self._look_up_remains, lost), now)
        if result is None:
            reason = f"looking up why {lost.token}/{lost.node} was lost"
            return False, Wait(now + _PENDING_CALL_POLL_S, reason)
        # Combined with the loss as it is decided now: the call may be of an earlier decision.
        crash, output = result.value
        explained = with_crash(self._journal_writer.view, lost, crash)
        if explained.unreachable is None:
            explained = with_unreachable(explained, self._unreachable(lost, now))
            # The agent could store no report: what it printed last is the only one.
            if explained.unreachable and not output and self._may_get_output(lost, now):
                return False, Wait(now + _OUTPUT_POLL_S, "reading the output of a lost machine")
        # A machine that failed to boot, was of no use, or was granted too few others, delays the
        # next request like a refusal.
        if lost.agent is None or lost.is_unused or lost.is_unusable:
            self._record_refusal(lost.token, now)
        explained = self._machine_times.with_loss_times(
            self._journal_writer.view.usage,
            replace(explained, output=output),
            self._journal_writer.ledger.wall_ms(),
        )
        self._journal_writer.write(explained, now)
        return True, _no_wait(now)

    def _look_up_remains(self, lost: NodeLost) -> tuple[AgentCrash | None, tuple[str, ...]]:
        """Return the crash and, of a failed start, the output of the machine; blocks."""
        crash = self._journal_writer.ledger.read_crash(lost.token, lost.node)
        handle = self._journal_writer.view.groups[lost.token].handle
        is_explained = crash is not None and crash.unreachable is not None
        if not lost.is_failed_start or handle is None or is_explained:
            return crash, ()
        # Now: releasing the group may delete the output.
        try:
            outputs = fetch_machine_output(
                self._provisioner, handle, lost.node, max_lines=_MAX_OUTPUT_LINES
            )
        except Exception as error:  # noqa: BLE001  # each client library has its own errors
            log.warning("machine.no_output", machine=f"{lost.token}/{lost.node}", reason=str(error))
            return crash, ()
        lines = [line for output in outputs[-1:] for line in output.lines]
        return crash, tuple(self._launch.without_secrets(one)[:_MAX_OUTPUT_CHARS] for one in lines)

    def _may_get_output(self, lost: NodeLost, now: float) -> bool:
        """Whether the backend may still receive what the machine printed."""
        since = self._output_awaited_since.setdefault((lost.token, lost.node), now)
        return self._provisioner.traits.keeps_output and now - since < _OUTPUT_WAIT_S

    def _unreachable(self, lost: NodeLost, now: float) -> Unreachable | None:
        """What the machine could not reach, by the exit code that the backend reports."""
        status = find_node_status(self.group_statuses, lost.token, lost.node)
        what = find_unreachable(status.exit_code) if status is not None else None
        # An outage of the storage is no fault of the machine: one that this process has also met,
        # or cannot have met, because the machine ended before this process observed it.
        has_failed = now - self._journal_writer.last_failure_at <= _STORAGE_OUTAGE_S
        if what is Unreachable.STORAGE and (lost.token, lost.node) not in self.reported_running:
            return None
        return None if has_failed and what is not Unreachable.RUN else what

    def _warn_about_open_groups(self, reason: str) -> None:
        groups = self._journal_writer.view.groups
        if left := [token for token, group in groups.items() if not group.is_closed]:
            log.warning(
                "run.machines_left",
                groups=",".join(left),
                reason=reason,
                do="run `spotfit sweep` where the backend can be used",
            )

    def _record_refusal(self, token: Token, now: float) -> None:
        self.refused_at[self._journal_writer.view.groups[token].role] = now

    def _plan_group(self, machine_request: RequestMachines, now: float) -> None:
        spec = self._journal_writer.view.spec
        time_limit_s = None
        if spec.time_budget_s is not None:
            left_s = spec.time_budget_s - self._journal_writer.elapsed_s(now)
            time_limit_s = math.ceil(max(0.0, left_s) + BACKEND_TIME_LIMIT_MARGIN_S)
        resources, offer = spec.resources_per_worker, machine_request.offer
        if machine_request.role == "validate" and spec.validation is not None:
            resources = spec.validation.resources
        elif machine_request.role == "feed" and spec.feeders is not None:
            resources = spec.feeders.resources
        request = replace(
            self._group_request(machine_request.num_workers, Token(self._new_token())),
            total_workers=spec.max_workers if machine_request.role == "train" else 1,
            resources_per_worker=resources,
            role=machine_request.role,
            network=network_in_use(self._journal_writer.view) if offer is None else offer.network,
            refused_networks=self._journal_writer.view.refused_networks,
            offer=offer,
            time_limit_s=time_limit_s,
        )
        # `plan` calls no cloud API, so it may precede the entry; `submit` must not.
        planned = GroupPlanned(
            request=request, plan=self._provisioner.plan(request), reason=machine_request.reason
        )
        self._planned_tokens.add(request.token)
        self._journal_writer.write(planned, now)

    def _group_request(self, num_workers: int, token: Token) -> GroupRequest:
        """A request for machines of workers, without the state of the run."""
        spec = self._journal_writer.view.spec
        return GroupRequest(
            token=token,
            num_workers=num_workers,
            total_workers=spec.max_workers,
            resources_per_worker=spec.resources_per_worker,
            run_url=self._launch.run_url,
            run_name=spec.name,
            run_id=spec.run_id,
        )

    def _price_requests(self, spec: RunSpec) -> Iterator[GroupRequest]:
        """The requests whose offers the leader knows: of workers, and of feeders with others."""
        request = self._group_request(spec.max_workers, Token("t-prices"))
        yield request
        if spec.feeders is not None and spec.feeders.offers:
            yield replace(
                request,
                num_workers=1,
                total_workers=1,
                resources_per_worker=spec.feeders.resources,
                role="feed",
            )

    def _submit_group(self, token: Token, now: float) -> tuple[bool, Wait]:
        view = self._journal_writer.view
        if view.fit_end is not None and token not in self._looked_up_at:
            # At once: a caller waits for the end. The time of all pending groups starts now, though
            # they are looked up one after the other: `FINAL_CALLS_TIMEOUT_S` is enough for one.
            for one, group in view.groups.items():
                if group.is_pending:
                    self._looked_up_at.setdefault(one, now)
                    self._retry_at.pop(one, None)
        retry_at = self._retry_at.get(token, now)
        if now < retry_at:
            return False, Wait(retry_at, "the request failed and will be retried")
        plan = view.groups[token].plan
        # After the end no machines are requested, only those that an earlier call may have got.
        # Under the same name: the result of a call in flight is awaited first.
        call = partial(find_group, self._provisioner) if view.fit_end else self._provisioner.submit
        if view.fit_end is None:
            self._submitted_tokens.add(token)
            if token in self._planned_tokens:
                self._machine_times.watch_from_request(token)
        result = self._background_calls.run(f"submit {token}", partial(call, plan, self._launch))
        if result is None:
            reason = f"requesting {plan.num_nodes} machines"
            return False, Wait(now + _PENDING_CALL_POLL_S, reason)
        is_final = result.error is not None and self._is_final(result.error, token, now)
        # A denied look-up does not show that nothing was granted.
        if result.error is not None and (not is_final or view.fit_end is not None):
            return False, self._retry_later(token, result.error, now)
        if view.fit_end is not None and result.error is None:
            self.answered_at = now
            certain_at = self._absence_certain_at(token)
            if result.value is None and now < certain_at:
                self._retry_at[token] = min(certain_at, now + _MAX_LOOK_UP_DELAY_S)
                return False, Wait(self._retry_at[token], "the backend may list the group late")
        self._held_since[token] = now
        self._journal_writer.write(self._submit_event(token, result, now), now)
        self.observe_soon()
        return True, _no_wait(now)

    def _absence_certain_at(self, token: Token) -> float:
        """From when on a group that a look-up has not found was never granted."""
        if token in self._planned_tokens and token not in self._submitted_tokens:
            return float("-inf")
        read_lag_s = self._provisioner.traits.read_lag_s
        # The call whose answer is collected now may have been made up to one interval ago.
        delay_s = read_lag_s + _MAX_LOOK_UP_DELAY_S if read_lag_s else 0.0
        return self._looked_up_at[token] + delay_s

    def _retry_later(self, token: Token, error: Exception, now: float) -> Wait:
        # Whether the cloud has executed the request is unknown. It is repeated with the same token:
        # a new one could launch, and cost, the machines twice.
        tries = self._submit_tries[token] = self._submit_tries.get(token, 0) + 1
        is_over = self._journal_writer.view.fit_end is not None
        longest_s = _MAX_LOOK_UP_DELAY_S if is_over else _MAX_RETRY_DELAY_S
        retry_at = self._retry_at[token] = now + exponential_backoff_s(
            tries, shortest_s=_MIN_RETRY_DELAY_S, longest_s=longest_s
        )
        reason = _format_error(error)
        log.warning("submit.retrying", token=token, tries=tries, reason=reason)
        return Wait(retry_at, f"retrying the request: {reason}")

    def _is_final(self, error: Exception, token: Token, now: float) -> bool:
        """Return whether repeating the request is pointless, and nothing was granted for it.

        Rejections, invalid options and a missing client library. A request that may have been
        granted to an earlier try or leader is repeated for `_MAX_REJECTED_S` first: a refused group
        is never released.
        """
        if not isinstance(error, (ProvisionError, ConfigError, MissingExtraError)):
            self._rejected_since.pop(token, None)
            return False
        is_first_try = token in self._planned_tokens and token not in self._submit_tries
        has_trained = self._journal_writer.view.round_opened_slot >= 0
        if is_first_try or (isinstance(error, ProvisionError) and not has_trained):
            return True
        return now - self._rejected_since.setdefault(token, now) >= _MAX_REJECTED_S

    def _submit_event(self, token: Token, result: BackgroundResult, now: float) -> JournalEvent:
        """An error is final here (`_is_final`); a refusal may be temporary.

        A value of None is the result of a look-up after the end: there are no machines.
        """
        if result.error is not None:
            self._record_refusal(token, now)
            return GroupRefused(token=token, reason=_format_error(result.error), is_final=True)
        if isinstance(result.value, Refusal):
            self._record_refusal(token, now)
            return GroupRefused(
                token=token, reason=result.value.reason, is_final=result.value.is_final
            )
        if result.value is None:
            return GroupRefused(token=token, reason="the fit ended before it was granted")
        return GroupSubmitted(token=token, handle=result.value)

    def _release_groups(self, tokens: tuple[Token, ...], now: float) -> tuple[bool, Wait]:
        """Cancel the groups concurrently and append one entry for all that were cancelled."""
        in_flight: list[Token] = []
        failure = ""
        for token in tokens:
            handle = self._journal_writer.view.groups[token].handle
            # Without a handle nothing was granted, so there is nothing to cancel.
            if token in self._cancelled_groups or handle is None:
                continue
            result = self._background_calls.run(
                f"release {token}", partial(self._provisioner.cancel, handle)
            )
            if result is None:
                in_flight.append(token)
            elif result.error is not None:
                failure = f"releasing {token} failed: {_format_error(result.error)}"
            else:
                self._cancelled_groups.add(token)
        if in_flight:
            reason = f"releasing {len(in_flight)} groups of machines"
            return False, Wait(now + _PENDING_CALL_POLL_S, reason)
        # Groups whose cancel failed are decided again from the next view; the others are recorded.
        released = [token for token in tokens if token in self._cancelled_groups]
        if not released:
            return False, Wait(now + _RELEASE_RETRY_S, failure)
        self._append_release(
            GroupsReleased(token=released[0], other_tokens=tuple(released[1:])), now
        )
        return True, _no_wait(now)

    def _append_release(self, released: GroupsReleased, now: float) -> None:
        usage = self._journal_writer.view.usage
        self._journal_writer.write(self._machine_times.with_release_times(usage, released), now)


def _no_wait(now: float) -> Wait:
    return Wait(now, "the journal was written")


def _format_error(error: Exception) -> str:
    return str(error) if isinstance(error, SpotfitError) else f"{type(error).__name__}: {error}"
