"""Spot, on-demand or no machines: the cheapest choice that keeps a deadline. Pure.

The slack σ is the time to the deadline minus the training time that is left. Training keeps it,
waiting spends it, and every start of machines spends the changeover time d. The choice of each
situation is taken only if the slack that remains suffices for the better choices to come:

    running   | spot      | choice
    ----------|-----------|------------------------------------------------------------------
    spot      | available | spot; on-demand if 0 ≤ σ < d < work left
    nothing   | available | spot if σ ≥ 2d + look, else on-demand
    on-demand | available | spot if it pays and σ ≥ d + 2·look + reserve, else on-demand; spot that
              |           | starts is kept without the reserve, a request with `look` less
    on-demand | refused   | on-demand
    nothing   | refused   | nothing if σ ≥ 2d + 2·look + reserve + outages, else on-demand

While only dearer spot machines are granted, a run without machines waits for cheaper ones that were
refused recently if σ suffices for `outages` of both: of the cheaper ones, and of all spot machines.

`reserve` is the slack that later starts of spot machines are expected to spend: one changeover for
each, as they start beside on-demand machines and only their loss leaves the run without machines.
`outages` is half the time that spot is expected to be refused until the deadline, more the longer
it has been refused. `look` is the longest time between two decisions.

The deadline is kept if σ ≥ d at the start, on-demand machines arrive within d and are not lost,
and d includes the restore and the work that a loss repeats: after each choice σ ≥ d whenever
nothing runs. If the training becomes slower or starts last longer, σ < d while spot machines run:
on-demand ones then replace them while the deadline can be kept. docs/decisions/0058 has the proof
and the figures; `benchmarks/cost.py` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from spotfit.core.units import format_seconds
from spotfit.model.offer import Market

# Mean time that spot machines run, and that spot is refused afterwards. The choice depends little
# on them: with twice or half of each the cost changes by 1 to 2 per cent (decision 0058).
MEAN_SPOT_LIFETIME_S = 2 * 3600.0
MEAN_OUTAGE_S = 3600.0
# Spot machines that have been refused for longer, in mean outages, are not waited for while dearer
# ones are granted: there may be none for this account at all.
_MAX_WAIT_OUTAGES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineState:
    """How far a run is from its deadline. Times are in seconds."""

    time_left_s: float
    """Until the deadline."""
    work_left_s: float
    """Training time that is left with all machines, including a start that is in progress."""
    changeover_s: float
    """From the loss of the machines to new progress on on-demand ones, including the work that is
    repeated."""
    look_s: float
    """Longest time until the next decision."""

    @property
    def slack_s(self) -> float:
        """Time that may pass without progress."""
        return self.time_left_s - self.work_left_s

    @property
    def changes_left(self) -> float:
        """Number of losses of spot machines that are expected until the deadline."""
        return self.time_left_s / (MEAN_SPOT_LIFETIME_S + MEAN_OUTAGE_S)


class MarketChoice(NamedTuple):
    """The market to rent machines on, or None to wait."""

    market: Market | None
    reason: str


def choose_market(
    state: DeadlineState,
    running: Market | None,
    *,
    spot_refused_s: float | None,
    price_ratio: float,
    is_returning: bool = False,
    is_requested: bool = False,
) -> MarketChoice:
    """Return the market on which the run should have its machines now.

    `running` is the market of the machines that run or start, None without machines.
    `spot_refused_s` is how long spot machines have been refused, None if they run or would be
    granted. `price_ratio` is the price of on-demand machines divided by that of spot machines.
    `is_returning` is whether spot machines start beside on-demand ones already, `is_requested`
    whether they are requested beside them and refused.

    Source: the Uniform Progress policy ("Can't Be Late", NSDI 2024) has the same inputs; the
    thresholds here also keep slack for later changes and for outages.
    """
    if spot_refused_s is not None:
        return _without_spot(state, running, spot_refused_s)
    if running is Market.SPOT:
        return _while_on_spot(state)
    if running is None:
        needed_s = 2 * state.changeover_s + state.look_s
        return _spot_if_slack(state, needed_s, "a start of spot machines and of on-demand ones")
    if not pays_to_return(state.changeover_s, price_ratio):
        return MarketChoice(
            Market.ON_DEMAND, "a return to spot machines would cost more than it saves"
        )
    needed_s = state.changeover_s + 2 * state.look_s
    # Slack at the limit must not start and release machines again and again.
    if not is_returning:
        # Nor switch a request on and off: the slack of two decisions differs by less than `look`.
        margin_s = state.look_s if is_requested else 0.0
        needed_s += max(0.0, _reserve_s(state) - margin_s)
    return _spot_if_slack(state, needed_s, "the changes to come")


def _while_on_spot(state: DeadlineState) -> MarketChoice:
    loss_misses_deadline = 0 <= state.slack_s < state.changeover_s
    # On-demand machines that arrive after the end of the training would be of no use.
    if loss_misses_deadline and state.work_left_s > state.changeover_s:
        slack = _slack_text(state, state.changeover_s)
        return MarketChoice(Market.ON_DEMAND, f"{slack} for a loss of the spot machines")
    return MarketChoice(Market.SPOT, "spot machines are the cheapest while they last")


def _without_spot(state: DeadlineState, running: Market | None, refused_s: float) -> MarketChoice:
    if running is Market.ON_DEMAND:
        return MarketChoice(Market.ON_DEMAND, "spot machines are refused")
    needed_s = _slack_to_wait_s(state, refused_s)
    slack = _slack_text(state, needed_s)
    if state.slack_s >= needed_s:
        return MarketChoice(None, f"waiting for spot machines: {slack}")
    return MarketChoice(Market.ON_DEMAND, f"spot machines are refused: {slack}")


def reason_to_wait_for_cheaper(state: DeadlineState, refused_s: float) -> str:
    """Return why a run without machines waits for cheaper spot machines, although others are
    granted; '' if it does not.

    The cheaper ones have been refused for `refused_s`. Waiting until no spot machines are refused
    any more is a better use of slack, so that the slack for all outages to come is kept.
    """
    if refused_s > _MAX_WAIT_OUTAGES * MEAN_OUTAGE_S:
        return ""
    needed_s = _slack_to_wait_s(state, refused_s) + _outages_s(state, math.inf)
    if state.slack_s < needed_s:
        return ""
    return f"waiting for cheaper spot machines: {_slack_text(state, needed_s)}"


def _slack_to_wait_s(state: DeadlineState, refused_s: float) -> float:
    fixed_s = 2 * (state.changeover_s + state.look_s)
    return fixed_s + _reserve_s(state) + _outages_s(state, refused_s)


def _outages_s(state: DeadlineState, refused_s: float) -> float:
    """Half of the outages that are expected until the deadline, less in one that began recently: it
    is likely to end soon."""
    expected_s = state.changes_left * MEAN_OUTAGE_S
    return expected_s * (1 - math.exp(-refused_s / MEAN_OUTAGE_S)) / 2


def _spot_if_slack(state: DeadlineState, needed_s: float, kept_for: str) -> MarketChoice:
    market = Market.SPOT if state.slack_s >= needed_s else Market.ON_DEMAND
    return MarketChoice(market, f"{_slack_text(state, needed_s)} for {kept_for}")


def _slack_text(state: DeadlineState, needed_s: float) -> str:
    slack_s = max(0.0, state.slack_s)
    return f"{format_seconds(slack_s)} of slack, {format_seconds(needed_s)} are kept"


def pays_to_return(changeover_s: float, price_ratio: float) -> bool:
    """Return whether a mean stay on spot saves more than the two changes that it takes.

    The second change is followed by on-demand machines for the share of an outage that the start
    delays them.
    """
    share = price_ratio * changeover_s / max(MEAN_OUTAGE_S - changeover_s, changeover_s)
    saved = (price_ratio - 1) * MEAN_SPOT_LIFETIME_S
    return saved >= changeover_s * (1 + price_ratio + share)


def _reserve_s(state: DeadlineState) -> float:
    return state.changeover_s * state.changes_left
