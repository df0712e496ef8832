"""What one process has observed of the billing of machines, and what of it is to be recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import GroupsReleased, MachineTimes, NodeLost
from spotfit.model.group import GroupStatus
from spotfit.model.usage import Usage, is_timed
from spotfit.policy.machine_record import (
    ObservedMachine,
    after_status,
    release_times,
    unrecorded_times,
)

_UNSEEN = ObservedMachine()


class MachineTimesRecorder:
    """Collects the reports of backends about the machines of a run, for one process.

    All times are milliseconds since 1970, by the clock of journal entries. In memory only: what a
    process has observed and not recorded is lost with it, and the next one has wider bounds.
    """

    def __init__(self) -> None:
        self._observed: dict[Token, dict[int, ObservedMachine]] = {}
        # A record is compared again only after it or the observations have changed.
        self._has_observed = False
        self._compared_usage: Usage | None = None
        self._unrecorded: dict[Token, tuple[MachineTimes, ...]] = {}

    def observe(
        self,
        token: Token,
        reported: GroupStatus,
        *,
        hidden: Collection[int] = (),
        called_ms: int,
        now_ms: int,
        status_lag_s: float,
    ) -> None:
        """Process the status of a group, for a call that was started at `called_ms`.

        The nodes in `hidden` may exist although the backend does not list them.
        """
        before = self._observed.get(token, {})
        after = dict(before)
        for node, status in enumerate(reported.nodes):
            if node not in hidden:
                after[node] = after_status(
                    before.get(node, _UNSEEN),
                    status,
                    called_ms=called_ms,
                    now_ms=now_ms,
                    status_lag_s=status_lag_s,
                )
        self._observed[token] = after
        self._has_observed = True

    def retain(self, tokens: Collection[Token]) -> None:
        """Forget all other groups."""
        for token in [one for one in self._observed if one not in tokens]:
            del self._observed[token]

    def unrecorded(self, usage: Usage) -> Mapping[Token, tuple[MachineTimes, ...]]:
        """Return the observed starts and ends that are not in the record, by group."""
        if self._has_observed or usage is not self._compared_usage:
            self._unrecorded = unrecorded_times(usage, self._observed)
            self._has_observed, self._compared_usage = False, usage
        return self._unrecorded

    def with_loss_times(self, usage: Usage, lost: NodeLost, now_ms: int) -> NodeLost:
        """Return the loss of a machine with what was observed of its start and end."""
        group = usage.groups.get(lost.token)
        if group is None:
            return lost
        seen = self._observed.get(lost.token, {}).get(lost.node, _UNSEEN)
        times = unrecorded_times(usage, {lost.token: {lost.node: seen}}).get(lost.token, ())
        found = next(iter(times), None)
        if not lost.machine_returned or (found and found.ended_ms) or is_timed(usage, group):
            return lost if found is None else replace(lost, times=found)
        # The backend does not report when the attempt ended and the next one started: the time
        # since the last observation is counted once.
        self._observed[lost.token] = {
            **self._observed.get(lost.token, {}),
            lost.node: ObservedMachine(waiting_ms=seen.running_ms),
        }
        started_ms = found.started_ms if found is not None else None
        ended_ms = min(seen.running_ms, now_ms - 1), now_ms
        return replace(
            lost, times=MachineTimes(node=lost.node, started_ms=started_ms, ended_ms=ended_ms)
        )

    def with_release_times(self, usage: Usage, released: GroupsReleased) -> GroupsReleased:
        """Return the release of groups with what was observed of their machines."""
        times = {
            token: found
            for token in (released.token, *released.other_tokens)
            if (found := release_times(usage, token, self._observed.get(token, {})))
        }
        return GroupsReleased(token=released.token, other_tokens=released.other_tokens, times=times)
