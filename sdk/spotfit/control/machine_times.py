"""What one process has observed of the billing of machines, and what of it is to be recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import GroupsReleased, MachineTimes, NodeLost
from spotfit.model.group import GroupStatus
from spotfit.model.usage import Usage, is_exact
from spotfit.policy.machine_record import (
    ObservedMachine,
    after_status,
    release_times,
    seen_in_record,
    unrecorded_times,
)
from spotfit.provision.api import Traits

_UNSEEN = ObservedMachine()


class MachineTimesRecorder:
    """Collects the reports of backends about the machines of a run, for one process.

    All times are milliseconds since 1970, by the clock of journal entries. In memory only: what a
    process has observed and not recorded is lost with it, and the next one has wider bounds.
    """

    def __init__(self) -> None:
        self._observed: dict[Token, dict[int, ObservedMachine]] = {}
        self._requested: set[Token] = set()
        # A record is compared again only after it or the observations have changed.
        self._has_observed = False
        self._compared_usage: Usage | None = None
        self._unrecorded: dict[Token, tuple[MachineTimes, ...]] = {}

    def watch_from_request(self, token: Token) -> None:
        """Note that this process requests the group: no attempt precedes its observations."""
        self._requested.add(token)

    def note_pause(self) -> None:
        """Note that this process has not observed for a while: it knows as much as a new one.

        Machines may have started, ended and started again meanwhile.
        """
        self._observed.clear()
        self._requested.clear()
        self._has_observed = True

    def observe(
        self,
        token: Token,
        reported: GroupStatus,
        traits: Traits,
        usage: Usage,
        *,
        called_ms: int,
        now_ms: int,
        hidden: Collection[int] = (),
    ) -> None:
        """Process the status of a group, for a call that was started at `called_ms`.

        `usage` is the present record. The nodes in `hidden` may exist although this read does not
        show them, and so may machines that the backend has never listed.
        """
        group, observed = usage.groups.get(token), self._observed.get(token, {})
        if group is None:
            return
        after = dict(observed)
        for node, status in enumerate(reported.nodes[: len(group.machines)]):
            use = group.machines[node]
            seen = observed.get(node) or seen_in_record(
                use,
                restarts=traits.requeues_itself,
                watched_from_ms=0 if token in self._requested else called_ms,
            )
            was_listed = use.ended_ms is not None or seen.started_ms is not None
            if node not in hidden and (status.is_known or was_listed):
                after[node] = after_status(
                    seen,
                    status,
                    called_ms=called_ms,
                    now_ms=now_ms,
                    status_lag_s=traits.status_lag_s,
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
        if group is None or lost.node >= len(group.machines):
            return lost
        seen = self._observed.get(lost.token, {}).get(lost.node, _UNSEEN)
        news = unrecorded_times(usage, {lost.token: {lost.node: seen}}).get(lost.token, ())
        found = next(iter(news), None)
        use = group.machines[lost.node]
        has_times = use.started_ms is None or is_exact(use.started_ms)
        if not lost.machine_returned or has_times or found is not None:
            return lost if found is None else replace(lost, times=found)
        # The backend does not report when the attempt ended and the next one started. The machine
        # may have been observed to run in either of them; the time until now is counted once.
        machines = self._observed.setdefault(lost.token, {})
        machines[lost.node] = ObservedMachine(restarts=seen.restarts)
        return replace(lost, times=MachineTimes(node=lost.node, ended_ms=(0, now_ms)))

    def with_release_times(self, usage: Usage, released: GroupsReleased) -> GroupsReleased:
        """Return the release of groups with what was observed of their machines."""
        times = {
            token: found
            for token in (released.token, *released.other_tokens)
            if (found := release_times(usage, token, self._observed.get(token, {})))
        }
        return GroupsReleased(token=released.token, other_tokens=released.other_tokens, times=times)
