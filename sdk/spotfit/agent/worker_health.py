"""Detects workers of this node that have stopped sending messages.

| state        | event                                    | next                          |
|--------------|------------------------------------------|-------------------------------|
| unknown      | first message                            | responsive                    |
| responsive   | no message for more than `timeout_s`     | unresponsive (reported once)  |
| unresponsive | message                                  | responsive (reported once)    |
| any          | process exited                           | unknown                       |
"""

from __future__ import annotations

# One or two heartbeats may be late on a busy node without a false alarm.
_HEARTBEATS_PER_TIMEOUT = 4
_MAX_HEARTBEAT_INTERVAL_S = 5.0


def heartbeat_interval_s(timeout_s: float) -> float:
    """Return the heartbeat interval with which silence is detected after `timeout_s`."""
    return min(_MAX_HEARTBEAT_INTERVAL_S, timeout_s / _HEARTBEATS_PER_TIMEOUT)


class WorkerLiveness:
    """Counts for how long each worker has been silent, from its first message on."""

    def __init__(self, timeout_s: float) -> None:
        self.check_interval_s = heartbeat_interval_s(timeout_s)
        self._timeout_s = timeout_s
        self._silent_s: dict[int, float] = {}
        self._unresponsive: set[int] = set()
        self._last_check_at: float | None = None

    def record_heartbeat(self, rank: int) -> bool:
        """Record a message of any kind; return whether the worker was unresponsive before."""
        was_unresponsive = rank in self._unresponsive
        self._unresponsive.discard(rank)
        self._silent_s[rank] = 0.0
        return was_unresponsive

    def remove(self, rank: int) -> None:
        """Forget a worker that has exited."""
        self._silent_s.pop(rank, None)
        self._unresponsive.discard(rank)

    def find_unresponsive(self, now: float) -> dict[int, float]:
        """Return the silent time in seconds of each worker that has become unresponsive.

        Call this every `check_interval_s`. Each worker is returned once per silence.
        """
        previous_at = now if self._last_check_at is None else self._last_check_at
        # A node that swaps or was suspended delays this process as much as its workers: a late
        # check counts no more than twice the interval (docs/decisions/0022).
        elapsed_s = min(now - previous_at, 2 * self.check_interval_s)
        self._last_check_at = now
        for rank in self._silent_s:
            self._silent_s[rank] += elapsed_s
        newly_unresponsive = {
            rank: silent_s
            for rank, silent_s in self._silent_s.items()
            if silent_s > self._timeout_s and rank not in self._unresponsive
        }
        self._unresponsive |= newly_unresponsive.keys()
        return newly_unresponsive
