"""How often checkpoints are wanted, what they cost, and how groups have ended so far."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.mistakes import Mistakes
from spotfit.core.nearest import did_you_mean
from spotfit.core.units import seconds

MAX_OVERHEAD = 0.035
"""The share of a run's time that checkpoints may cost where the user says nothing else."""

BRACKETS_S = (600.0, 1800.0, 7200.0, 28800.0)
"""Ages of groups are told apart at these: most that are taken early are taken very early."""

_WORDS = ("auto", "epoch", "at_notice")
_STEPS = re.compile(r"\s*(\d+)\s*steps?\s*")
_NO_LIVES = (0,) * (len(BRACKETS_S) + 1)
_NO_TIME = (0.0,) * (len(BRACKETS_S) + 1)


class Cadence(msgspec.Struct, frozen=True):
    """When the user wants a checkpoint: whatever comes first of what is set.

    At a notice one is saved whatever is set, and with nothing set only then.
    """

    auto: bool = False
    every_s: float | None = None
    every_steps: int | None = None
    epochs: bool = False
    """At the end of each epoch."""
    max_overhead: float = MAX_OVERHEAD
    """The largest share of the run's time that `auto` may spend on checkpoints."""


class Costs(msgspec.Struct, frozen=True):
    """What a save costs, as measured: of the rank that it costs most, over the last few saves."""

    stall_s: float
    """How long the training loop stands still."""
    slowdown: float
    """By which share steps are slower while the save is on its way."""
    commit_s: float
    """From the snapshot to the commit."""

    @property
    def each_s(self) -> float:
        """Training time that one save costs."""
        return self.stall_s + self.slowdown * self.commit_s


class Endings(msgspec.Struct, frozen=True):
    """How groups of a run have ended, and how long they lived; a group is as old as its last loss.

    Everything that ends one against its will counts, whoever is to blame: a crash loses as much as
    a reclaim.
    """

    ended: tuple[int, ...] = _NO_LIVES
    """By age: how many groups ended at it. Brackets are those of `BRACKETS_S`."""
    lived_s: tuple[float, ...] = _NO_TIME
    """By age: for how long groups of that age were watched."""
    announced: int = 0
    """Those whose end was told, and that could save in time."""

    @property
    def all_ended(self) -> int:
        return sum(self.ended)

    def watched(self, life_s: float) -> Endings:
        """With a group that has lived so long, and goes on or was ended on purpose."""
        spent = zip(self.lived_s, _spent(life_s), strict=True)
        return replace(self, lived_s=tuple(before + more for before, more in spent))

    def with_end(self, life_s: float, *, saved: bool) -> Endings:
        """With a group that was ended after so long; `saved`: announced, and saved in time."""
        counts = list(self.ended)
        counts[bracket(life_s)] += 1
        announced = self.announced + (1 if saved else 0)
        return replace(self.watched(life_s), ended=tuple(counts), announced=announced)


class Market(msgspec.Struct, frozen=True):
    """What a backend says of its machines, before a run has seen any."""

    life_s: float = 4 * 3600.0
    """How long a machine is left to its user, on average."""
    notice_s: float = 0.0
    """How long before its end that is announced; 0: it is not."""


class Odds(msgspec.Struct, frozen=True):
    """What a group has to expect, as far as is known when its round opens."""

    market: Market = Market()
    machines: int = 1
    endings: Endings = Endings()
    age_s: float = 0.0
    """How old the group is when the round opens: that changed its size may have been older."""


def bracket(age_s: float) -> int:
    """Which bracket a group of that age is in."""
    return sum(age_s >= edge for edge in BRACKETS_S)


def _spent(life_s: float) -> tuple[float, ...]:
    """How much of a life was spent in each bracket."""
    edges = (0.0, *BRACKETS_S, math.inf)
    return tuple(max(0.0, min(life_s, end) - begin) for begin, end in itertools.pairwise(edges))


def parse_cadence(every: Any, *, max_overhead: Any = MAX_OVERHEAD) -> Cadence:
    """What `every` means: "auto", "10m", 500 or "500 steps", "epoch", "at_notice", or several.

    Raises `ConfigError`; of several mistakes `ConfigErrors`, with all of them.
    """
    mistakes = Mistakes()
    wishes = list(every) if isinstance(every, list | tuple) else [every]
    parts = [mistakes.check(partial(_wish, wish)) for wish in wishes]
    _check_together(mistakes, every, [part for part in parts if part is not None])
    if not _is_number(max_overhead) or not 0 < max_overhead < 1:
        mistakes.add(
            ConfigError(
                f"max_overhead must be a share between 0 and 1, not {max_overhead!r}.",
                do="0.035 lets checkpoints cost 3.5 % of the time.",
            )
        )
    mistakes.raise_all()
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= part
    return Cadence(**fields, max_overhead=float(max_overhead))


def _wish(wish: Any) -> dict[str, Any]:
    """One of the things that `every` may be, as a field of `Cadence`; none for "at_notice"."""
    if isinstance(wish, bool) or not isinstance(wish, str | int):
        raise ConfigTypeError(
            f"every={wish!r} is neither a number of steps nor a text.",
            do='Write a whole number of steps, or text: "auto", "10m", "epoch", "at_notice".',
        )
    if isinstance(wish, int):
        return _steps(wish)
    word = wish.strip().lower()
    if word in _WORDS:
        return {"auto": {"auto": True}, "epoch": {"epochs": True}}.get(word, {})
    if steps := _STEPS.fullmatch(word):
        return _steps(int(steps[1]))
    return _duration(wish)


def _steps(steps: int) -> dict[str, Any]:
    if steps < 1:
        raise ConfigError(
            f"every={steps} steps: that is never.", do='Give at least 1, or "at_notice".'
        )
    return {"every_steps": steps}


def _duration(text: str) -> dict[str, Any]:
    if not text.strip()[:1].isdigit():
        raise ConfigError(
            f"every={text!r} says no time.",
            do=f'{did_you_mean(text.strip(), _WORDS)} Or write a time, "10m", or steps, 500.',
        )
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(
            f"every={text!r} has no unit.",
            do=f'Write "{text.strip()}s" for seconds, or {text.strip()} without quotes for steps.',
        )
    every_s = seconds(text)
    if every_s <= 0:
        raise ConfigError(f"every={text!r}: that is no time at all.", do='Write "10m", or "auto".')
    return {"every_s": every_s}


def _check_together(mistakes: Mistakes, every: Any, parts: Sequence[dict[str, Any]]) -> None:
    if isinstance(every, list | tuple) and not every:
        mistakes.add(ConfigError("every is empty.", do='Write "at_notice" for no other saves.'))
    names = [name for part in parts for name in part]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        mistakes.add(
            ConfigError(f"every={every!r} says {', '.join(map(_told, twice))} twice.", do="Choose.")
        )
    if "auto" in names and {"every_s", "every_steps"} & {*names}:
        mistakes.add(
            ConfigError(
                f'every={every!r}: "auto" finds the interval by itself.',
                do='Leave out either "auto" or the interval; "epoch" may stay.',
            )
        )


def _told(field: str) -> str:
    return {"every_s": "a time", "every_steps": "a number of steps", "epochs": '"epoch"'}.get(
        field, f'"{field}"'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
