"""`EndRecorder`: records when released machines have ended, after the end of a fit.

The last leader releases its own machine and exits; other machines end a moment after their release.
A process that supervises the run, such as the client, observes them once more, so that the bill has
the times that the backend reports. While a fit is active its leader does so (`control.reconciler`).

    state of a released group | event                                   | next
    --------------------------|-----------------------------------------|------------------------
    ending                    | the backend reports an end              | `MachinesObserved`
    ending                    | the backend cannot be opened            | not observed again
    ending                    | `WAIT_S` without an end                 | not observed again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spotfit.control.background_calls import BackgroundCalls, BackgroundResult
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.machine_times import MachineTimesRecorder
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.events import MachinesObserved
from spotfit.model.group import GroupStatus
from spotfit.model.usage import GroupUsage
from spotfit.model.view import View
from spotfit.provision.api import Provisioner, Traits

# Backends report the end of a container some seconds after its agent has exited. Longer than most,
# and short for a user who waits for `fit()` to return.
WAIT_S = 20.0

_INTERVAL_S = 1.0
_PENDING_CALL_POLL_S = 0.1
_NEVER = float("inf")


class EndRecorder:
    """Observes the released groups of the last fit, one after the other, for one process.

    `now` is that process's `Clock.now()` in seconds.
    """

    def __init__(
        self,
        journal_writer: JournalWriter,
        open_provisioner: Callable[[str, dict[str, Any]], Provisioner],
        background_calls: BackgroundCalls,
    ) -> None:
        """`open_provisioner` opens a backend by the name and options of a spec."""
        self._journal_writer = journal_writer
        self._open_provisioner = open_provisioner
        self._background_calls = background_calls
        self._times = MachineTimesRecorder()
        self._in_flight: Token | None = None
        self._called_ms = 0
        self._observe_at: dict[Token, float] = {}
        self._until: dict[Token, float] = {}

    def observe(self, now: float) -> None:
        """Start or collect one observation, and append what is new; call it in every tick."""
        view = self._journal_writer.ledger.journal_view
        if not isinstance(view, View):
            return
        ending = self._ending(view)
        for token in ending:
            self._until.setdefault(token, now + WAIT_S)
        self._advance_call(view, ending, now)
        times = self._times.unrecorded(view.usage)
        if times and self._journal_writer.is_settled:
            self._journal_writer.write(MachinesObserved(times={**times}), now)

    def wake_at(self, now: float) -> float:
        """When `observe` must be called again, in seconds of `Clock.now()`, or infinity."""
        view = self._journal_writer.ledger.journal_view
        if self._in_flight is not None:
            return now + _PENDING_CALL_POLL_S
        due = (
            self._observe_at.get(token, now)
            for token in (self._ending(view) if isinstance(view, View) else ())
            if now < self._until.get(token, _NEVER)
        )
        return min(due, default=_NEVER)

    def is_waiting(self, now: float) -> bool:
        """Whether the bill of the run is to become exact soon.

        Only for machines with a known price: without one, no process waits for the bill.
        """
        view = self._journal_writer.ledger.journal_view
        return isinstance(view, View) and any(
            now < self._until.get(token, _NEVER) and _is_priced(view, group)
            for token, group in self._ending(view).items()
        )

    def _ending(self, view: View) -> dict[Token, GroupUsage]:
        if view.fit_end is None:
            return {}
        return {
            token: group
            for token, group in view.usage.ending_groups.items()
            if group.handle is not None and group.fit_count == view.fit_count
        }

    def _advance_call(self, view: View, ending: dict[Token, GroupUsage], now: float) -> None:
        token = self._in_flight or next(
            (
                token
                for token in ending
                if self._observe_at.get(token, now) <= now < self._until[token]
            ),
            None,
        )
        if token is None:
            return
        if self._in_flight is None:
            self._called_ms = self._journal_writer.ledger.wall_ms()
        # Another process may have recorded the end meanwhile; the result is collected anyway.
        group = ending.get(token)
        observe = partial(self._observe, view, group) if group is not None else lambda: None
        result = self._background_calls.run(f"observe the end of {token}", observe)
        self._in_flight = token if result is None else None
        if result is not None and group is not None:
            self._on_result(token, result, now)

    def _observe(self, view: View, group: GroupUsage) -> tuple[GroupStatus, Traits]:
        spec = view.spec
        provisioner = self._open_provisioner(spec.provisioner, spec.provisioner_options)
        assert group.handle is not None, "released groups without a handle are not observed"
        return provisioner.observe(group.handle), provisioner.traits

    def _on_result(self, token: Token, result: BackgroundResult, now: float) -> None:
        self._observe_at[token] = now + _INTERVAL_S
        if result.error is not None:
            # A missing package or permission does not appear by itself.
            if isinstance(result.error, SpotfitError):
                self._until[token] = now
                log.info("machines.end_unknown", token=token, reason=result.error.message)
            return
        if result.value is None:  # of a call for a group that was settled
            return
        status, traits = result.value
        self._times.observe(
            token,
            status,
            traits,
            self._journal_writer.ledger.journal_view.usage,
            called_ms=self._called_ms,
            now_ms=self._journal_writer.ledger.wall_ms(),
        )


def _is_priced(view: View, group: GroupUsage) -> bool:
    offer = view.usage.offers.get(group.offer)
    return offer is not None and offer.price is not None
