"""Whether it pays to wait for checkpoints that are still on their way when their round is over."""

from __future__ import annotations

import math

from spotfit.model.view import View
from spotfit.model.watch import Seat, Watch
from spotfit.policy.actions import Wait
from spotfit.policy.failure import verdict
from spotfit.policy.recovery import from_memory


def awaited(view: View, watch: Watch, now: float) -> Wait | None:
    """Until when to wait for what workers of the last round gave away; None if for nothing.

    What it would save is the work done since the last commit. Waiting for as long as that at the
    most, the run never loses more than twice what the wiser choice would have cost. Where no round
    follows, the machines' memory ends with them, and nobody waits to go on: then all is awaited.
    """
    assert view.spec is not None
    last = view.last_round
    if view.round is not None or last is None:
        return None
    final = verdict(view) is not None
    here = [place for place in last.places if place.agent in watch.seats]
    if not final and from_memory(view, here, watch.seats.values()) is not None:
        return None  # the next round has what is being uploaded, and more
    tempo = view.spec.tempo
    worth_s = math.inf if final else watch.unsaved_s
    until = watch.turned_at + min(worth_s, tempo.upload_patience_s)
    stopped = watch.turned_at + min(worth_s, tempo.stop_patience_s)
    carrying = [seat for seat in watch.seats.values() if seat.carrying == last.number]
    if carrying and now < until:
        return Wait(until, f"{len(carrying)} machines still upload what was reported")
    if now < stopped and any(_may_carry(seat, last.number) for seat in watch.seats.values()):
        return Wait(stopped, "workers of the last round still end, and may have given files away")
    return None


def _may_carry(seat: Seat, number: int) -> bool:
    """Only when its workers are gone does a machine say what they left to it."""
    return seat.running == number
