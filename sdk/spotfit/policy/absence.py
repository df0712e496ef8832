"""Absence: agents of a round that are not connected any more, and what their backend knows.

A broken connection alone says nothing of its machine: only the backend can tell a machine that was
taken away from one that runs on with a dead agent, or behind a network that failed.
"""

from __future__ import annotations

import enum

from spotfit.core.ids import AgentId, Token
from spotfit.model.group import NodeState
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Place


class Word(enum.Enum):
    """What the backend says of a machine whose agent is absent."""

    GONE = "it does not run any more"
    RUNS = "it runs all the same"
    NOTHING = "it has not said anything that is surely newer"


def absent_since(view: View, watch: Watch, agent: AgentId) -> float | None:
    """Since when that agent is missing, by the leader's clock; None if it is here."""
    if agent in watch.seats:
        return None
    if agent in watch.gone:
        return watch.gone[agent]
    led = view.leader is not None and view.leader.lost == agent
    return watch.led_since if led else None


def away(view: View, watch: Watch, place: Place) -> bool:
    """Whether the agent of that place is missing, for whatever reason."""
    return place.agent in view.lost_agents or absent_since(view, watch, place.agent) is not None


def backend_says(watch: Watch, token: Token, node: int, since: float) -> Word:
    """That it is over holds for ever; that it runs counts only if it is true after `since`."""
    status = watch.statuses.get(token)
    if status is None or node >= len(status.nodes):
        return Word.NOTHING
    if status.nodes[node].over:
        return Word.GONE
    if watch.seen.get(token, float("-inf")) < since:
        return Word.NOTHING
    return Word.RUNS if status.nodes[node].state is NodeState.RUNNING else Word.GONE


def taken_away(view: View, watch: Watch, place: Place) -> bool:
    """Whether that machine is lost as far as anybody knows, and did not merely fall silent."""
    if place.agent in view.lost_agents:
        return place.agent not in view.outages
    since = absent_since(view, watch, place.agent)
    if since is None:
        return False
    announced = place.agent in view.notices
    return announced or backend_says(watch, place.token, place.node, since) is Word.GONE


def unexplained(view: View, watch: Watch, place: Place) -> bool:
    """Whether that machine's agent is missing and the backend may still say why."""
    since = absent_since(view, watch, place.agent)
    if since is None or place.agent in view.lost_agents or place.agent in view.notices:
        return False
    return backend_says(watch, place.token, place.node, since) is Word.NOTHING
