"""Pauses between requests for machines of workers, after refusals, failed boots and releases. Pure.

After a refusal a run pauses longer each time, up to a minute. It pauses longer for offers that it
does not need at once, after machines were released because too few were granted, and for a network
whose machines have started, but could train nothing.
"""

from __future__ import annotations

import hashlib

from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.ids import Token
from spotfit.core.units import format_seconds
from spotfit.model.leader_state import LeaderState
from spotfit.model.market_record import UnusableNetwork, network_of
from spotfit.model.view import View

# Longest pause between two requests for machines. Clouds return capacity within minutes; polling
# once a minute loses little time and stays far below API rate limits.
_MAX_BACKOFF_S = 60.0
_MIN_BACKOFF_S = 0.5
# Pauses of a standing request, while machines of another offer train: a share of the time for which
# it was refused, so that a move to cheaper machines is late by this share of the outage at most.
_STANDING_PAUSE_SHARE = 0.05
_MAX_STANDING_PAUSE_S = 600.0
# Pauses after machines of another network could train nothing, doubled for every further group: the
# reason is usually permanent, such as a package that is not available there, and each attempt is
# paid for. At the longest pause that is less than a hundredth of the cost of the training.
_UNUSABLE_PAUSE_S = 60.0
_MAX_UNUSABLE_PAUSE_S = 6 * 3600.0
# Longest pause after machines were released because too few were granted.
_MAX_RELEASE_PAUSE_S = 3600.0


def next_request_at(view: View, state: LeaderState) -> float:
    """Return the earliest time of the next request, in seconds of the leader's `Clock.now()`.

    `-math.inf` (at once) without refusals and boot failures since the last success, and for a new
    leader; otherwise exponential backoff of 1 to 60 s after the last one. Minutes after machines
    were released because too few were granted, counted from the election for a new leader. A new
    headless leader without machines does not pause: a sweep ends before, and the next one would
    start again; the time between sweeps takes the place of the pause.
    """
    # Few failed starts end the run, so that their pauses need not grow with the number of machines.
    boot_failures = view.failed_starts or view.boot_failures
    failures = max(view.refusals, boot_failures)
    refused_at = state.refused_at.get("train")
    if view.is_capacity_released:
        has_machines = any(group.active_nodes for group in view.groups.values())
        if state.is_headless and refused_at is None and not has_machines:
            return float("-inf")
        refused_at = state.leading_since if refused_at is None else refused_at
        return refused_at + _release_pause_s(view, view.partial_releases)
    if refused_at is None or failures == 0:
        return float("-inf")
    return refused_at + exponential_backoff_s(
        failures, shortest_s=_MIN_BACKOFF_S, longest_s=_MAX_BACKOFF_S
    )


def _release_pause_s(view: View, releases: int) -> float:
    shortest_s = view.spec.timing.partial_capacity_pause_s
    pause_s = exponential_backoff_s(
        releases - 1, shortest_s=shortest_s, longest_s=_MAX_RELEASE_PAUSE_S
    )
    return pause_s * (0.5 + release_jitter(view))


def release_jitter(view: View) -> float:
    """Return a number from 0 to 1 that differs between runs, and between the releases of one run.

    Two runs that hold parts of one quota must not release and request at the same times.
    """
    text = f"{view.run_id} {view.partial_releases}"
    # Not a CRC, which gives similar ids similar numbers.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def offer_request_due_s(view: View, offer: str) -> float:
    """Return when the offer may be requested again, as `JournalView.elapsed_s`; 0 for at once."""
    record, unusable_s = view.market.record_of(offer), unusable_until_s(view, offer)
    if not record.refusals:
        return unusable_s
    longest_s = _MAX_BACKOFF_S
    choice = view.market.choice
    if view.market.round is not None and (choice is None or offer not in choice.workers):
        # Machines of other offers train. A zone without capacity would otherwise add thousands of
        # entries per day to the journal.
        since_s = record.refused_at_s if record.refused_since_s is None else record.refused_since_s
        refused_s = record.refused_at_s - since_s
        longest_s = min(_MAX_STANDING_PAUSE_S, max(longest_s, _STANDING_PAUSE_SHARE * refused_s))
    pause_s = exponential_backoff_s(record.refusals, shortest_s=_MIN_BACKOFF_S, longest_s=longest_s)
    return max(unusable_s, record.refused_at_s + pause_s)


def move_due_s(view: View, offer: str) -> float:
    """Return when the run may move to the offer again after it granted too few machines for a move.

    As `JournalView.elapsed_s`; 0 if it did not. Neither refusals nor other rounds change it.
    """
    record = view.market.record_of(offer)
    if not record.incomplete_moves:
        return 0.0
    return record.incomplete_at_s + _release_pause_s(view, record.incomplete_moves)


def unusable_until_s(view: View, offer: str) -> float:
    """Return until when no machines of the offer are requested because of others of its network.

    These had started, but could train nothing. As `JournalView.elapsed_s`; 0 if there were none.
    """
    networks = (network_of(one) for one in view.spec.cost.offers if one.name == offer)
    unusable = view.market.unusable_networks.get(next(networks, ""))
    return 0.0 if unusable is None else unusable.last_at_s + _unusable_pause_s(unusable.starts)


def unusable_pause_text(view: View, token: Token) -> str:
    """Return when the network of a group whose machines can train nothing is used again."""
    request = view.market.requests.get(token)
    if request is None or not request.network:
        return ""
    unusable = view.market.unusable_networks.get(request.network, UnusableNetwork())
    starts = unusable.starts + (not request.is_unusable)
    pause_s = _unusable_pause_s(starts)
    count = "" if starts == 1 else f" ({starts} times in a row)"
    return f"{count}; no further machines are requested there for {format_seconds(pause_s)}"


def _unusable_pause_s(starts: int) -> float:
    return exponential_backoff_s(
        starts - 1, shortest_s=_UNUSABLE_PAUSE_S, longest_s=_MAX_UNUSABLE_PAUSE_S
    )
