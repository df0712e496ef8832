"""The validation that the journal assigns to this node.

| state    | event                                 | next                                    |
|----------|---------------------------------------|-----------------------------------------|
| idle     | assigned to this node by the journal  | running: validator process started      |
| running  | the process returned a result or died | finished                                |
| running  | timeout                               | finished with "timeout", process killed |
| running  | not assigned to this node any more    | idle, process killed                    |
| finished | connected to a new leader             | finished, reported again                |
| finished | the journal has the result            | idle                                    |

See docs/decisions/0024.
"""

from __future__ import annotations

from spotfit.agent.ports import AgentTransport, Validator
from spotfit.core.ids import AgentId
from spotfit.model.events import ValidationStarted
from spotfit.model.leader_state import ValidationReported
from spotfit.model.view import View


class NodeValidation:
    """Runs the validation assigned to this node, and reports its result to the leader.

    The report is repeated to every new leader until the journal contains the result: the previous
    leader may have died before it appended the entry. One per agent; no method blocks.
    """

    def __init__(self, agent_id: AgentId, net: AgentTransport, validator: Validator) -> None:
        self._agent_id = agent_id
        self._net = net
        self._validator = validator
        self._last_attempt = 0
        """The latest attempt started here; an attempt is started only once."""
        self._current: ValidationStarted | None = None
        self._timeout_s: float | None = None
        self._deadline: float | None = None
        self._pending_report: ValidationReported | None = None
        self._is_reported = False

    @property
    def is_busy(self) -> bool:
        """Whether a validator process exists on this node, also one that is being killed."""
        return self._validator.is_running

    @property
    def wake_at(self) -> float:
        """Event-loop time in seconds of the running validation's timeout; infinity without one."""
        return float("inf") if self._deadline is None else self._deadline

    def apply_view(self, view: View, now: float) -> None:
        """Start the validation that the journal assigns to this node; stop any other.

        Called at each tick. Each attempt is started once; its timeout counts from `now`, event-loop
        time in seconds.
        """
        assigned = view.current_validation
        if assigned is not None and assigned.agent != self._agent_id:
            assigned = None
        if self._current is not None and self._current != assigned:
            self.stop()
        # The view repeats an assignment until the journal has its result: start it only once. A
        # process that was killed still holds its accelerators until it has exited.
        if assigned is None or assigned.attempt <= self._last_attempt or self._validator.is_running:
            return
        checkpoint = next(
            (
                commit
                for commit in view.unvalidated_checkpoints
                if commit.uid == assigned.checkpoint_uid
            ),
            None,
        )
        if checkpoint is None:
            return
        self._last_attempt, self._current = assigned.attempt, assigned
        self._pending_report, self._is_reported = None, False
        request, config = checkpoint.validation, view.spec.validation
        # Without arguments the request is `validation=True`, which has no timeout of its own.
        if request is None or request.fn_kwargs is None:
            self._timeout_s = config.timeout_s if config else None
        else:
            self._timeout_s = request.timeout_s
        # Enforced by this node, the only one whose clock has seen the start.
        self._deadline = None if self._timeout_s is None else now + self._timeout_s
        self._validator.start(view.spec, checkpoint)

    def poll(self, now: float) -> None:
        """Take the result of the process, or kill it after its timeout; called at each tick.

        The outcome is kept for `send_report`. `now` is event-loop time in seconds.
        """
        # Taken even if it is not needed: the result of a killed process must not be used later.
        result = self._validator.take_result()
        if self._current is None:
            return
        if result is not None:
            attempt, reason = self._current.attempt, result.message
            if result.retryable:
                report = ValidationReported(attempt=attempt, status="lost", reason=reason)
            elif result.metrics is None:
                report = ValidationReported(attempt=attempt, status="failed", reason=reason)
            else:
                report = ValidationReported(
                    attempt=attempt, status="validated", metrics=result.metrics
                )
            self._finish(report)
        elif self._deadline is not None and now >= self._deadline:
            # Not restarted: a function that needs longer than its timeout would do so again.
            self._validator.stop()
            reason = f"the validation took longer than its timeout of {self._timeout_s:g} s"
            self._finish(
                ValidationReported(attempt=self._current.attempt, status="timeout", reason=reason)
            )

    def send_report(self, *, is_reconnected: bool) -> None:
        """Send the result to the leader, once per connection; no effect without a result.

        Call it only while connected. `is_reconnected`: whether the connection is new.
        """
        if self._pending_report is not None and (is_reconnected or not self._is_reported):
            self._is_reported = True
            self._net.send_to_leader(self._pending_report)

    def stop(self) -> None:
        """Kill the process, if there is one, and discard its result. Harmless if repeated."""
        self._validator.stop()
        self._current = self._deadline = self._pending_report = None

    def _finish(self, report: ValidationReported) -> None:
        self._pending_report, self._is_reported = report, False
        self._deadline = None
