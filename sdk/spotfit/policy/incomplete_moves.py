"""Moves to spot machines of which only a part is granted. Pure.

That part is paid for and trains nothing while the round runs on machines of other offers. After
`partial_capacity_timeout_s` the move is ended: its machines are released, and all are requested
again after a pause (docs/decisions/0084).

    state of a move    | event                                       | next
    -------------------|---------------------------------------------|-----------------------------
    a part is granted  | the rest is granted                         | all are granted
    a part is granted  | the timeout, see `_incomplete_since_s`      | ended
    all are granted    | a round on these machines alone             | moved: pauses are short again
    all are granted    | one is lost, or more are needed             | a part is granted
    ended              | a pause of 5, 10, … 60 minutes; or the last | possible
                       | machine of the last round is lost           |

`partial_capacity` has the same timeout and pauses for machines that wait without a round.
"""

from __future__ import annotations

from collections.abc import Collection

from spotfit.core.ids import Token
from spotfit.core.units import format_seconds
from spotfit.model.leader_state import LeaderState
from spotfit.model.offer import Market
from spotfit.model.view import View
from spotfit.policy.request_backoff import move_due_s, release_jitter


def incomplete_move(view: View, state: LeaderState) -> tuple[str, str]:
    """Return the spot offer that has granted too few machines for too long, and why the move to it
    is ended; '' for none.

    Of the chosen offers and the standing request, without those whose machines train. Not an
    on-demand offer, which is chosen because the deadline requires it.
    """
    opened, choice = view.market.round, view.market.choice
    if opened is None or choice is None:
        return "", ""
    spot = {one.name for one in view.spec.cost.offers if one.market is Market.SPOT}
    beside = ({*choice.workers, choice.standing_offer} & spot) - _offers_of(view, opened.tokens)
    limit_s = view.spec.timing.partial_capacity_timeout_s * (1 + release_jitter(view) / 2)
    for name in sorted(beside):
        since_s = _incomplete_since_s(view, name)
        if since_s is not None and state.elapsed_s - since_s > limit_s:
            limit = format_seconds(limit_s)
            return name, f"{name} has granted only a part of the machines for more than {limit}"
    return "", ""


def is_move_paused(view: View, state: LeaderState, offer: str) -> bool:
    """Whether the run does not move to the offer, because it had granted too few machines.

    Only while the run has machines of its last round, on other offers: without any, it needs those
    of each offer.
    """
    if state.elapsed_s >= move_due_s(view, offer) or view.last_round is None:
        return False
    left = [
        one.token
        for one in view.last_round.assignments
        if one.token in view.groups and view.groups[one.token].is_node_active(one.node)
    ]
    return bool(left) and offer not in _offers_of(view, left)


def _incomplete_since_s(view: View, offer: str) -> float | None:
    """Since when too few machines of the offer run for a move, as `JournalView.elapsed_s`; None if
    enough do, or none.

    From the first start among the machines that run, but not before enough ran for the last time.
    Of the journal, so that it is the same for each leader.
    """
    started = view.started_nodes(offer)
    if not started or view.is_move_complete(offer):
        return None
    first_s = min(view.market.requests[token].started_s[node] for token, node in started)
    return max(first_s, view.market.record_of(offer).complete_s)


def _offers_of(view: View, tokens: Collection[Token]) -> set[str]:
    requests = view.market.requests
    return {requests[token].offer for token in tokens if token in requests}
