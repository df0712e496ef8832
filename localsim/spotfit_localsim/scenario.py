"""The words scenarios are written in: what is trained, on which market, and what befalls whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spotfit.model.spec import Keep, Limits, Tempo, Vigil
from spotfit_localsim.faults import CALM, Faults, Span
from spotfit_localsim.market import Market
from spotfit_localsim.workload import Workload


@dataclass(frozen=True, slots=True)
class At:
    """So many seconds after the beginning."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """When the training has come so far for the first time."""

    number: int


When = At | Step
Whom = Literal["leader", "follower", "anybody", "everybody"]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The market takes machines back."""

    when: When
    whom: Whom = "anybody"
    notice: bool = False


@dataclass(frozen=True, slots=True)
class Freeze:
    """Agents stop for so long, and know nothing of it."""

    when: When
    seconds: float
    whom: Whom = "leader"


@dataclass(frozen=True, slots=True)
class Crash:
    """An agent's process dies, and its machine with it."""

    when: When
    whom: Whom = "leader"


@dataclass(frozen=True, slots=True)
class Isolate:
    """Machines are cut off from the others, in one direction or both; the bucket stays in reach."""

    when: When
    seconds: float
    whom: Whom = "leader"
    outwards: bool = True
    inwards: bool = True


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody wants the run to end."""

    when: When


@dataclass(frozen=True, slots=True)
class Outage:
    """The bucket refuses everybody for so long."""

    when: When
    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Requests to the bucket hang for so long: nobody is refused, and nobody answered."""

    when: When
    seconds: float


Act = Reclaim | Freeze | Crash | Isolate | Cancel | Outage | Stall


@dataclass(frozen=True, slots=True)
class Wire:
    """The network between the machines."""

    latency_s: Span = (0.0005, 0.003)
    resets_per_hour: float = 0.0
    """How often a connection is cut while both its ends live."""
    walls_per_hour: float = 0.0
    """How often some machine is cut off from the others."""
    wall_s: Span = (1.0, 30.0)


@dataclass(frozen=True, slots=True)
class Laptop:
    """Where `fit()` was called."""

    dies_at_s: float | None = None
    sweep_every_s: float | None = 90.0
    """How often a one-shot sweep comes by once the laptop is gone; None: never."""
    sweep_s: float = 45.0
    """How long one of them watches."""
    swept_anyway: bool = False
    """Whether sweeps come by from the beginning, beside the laptop."""


@dataclass(frozen=True)
class Scenario:
    """A world and what happens in it. Everything not said here comes from the seed."""

    name: str
    workers: int = 4
    workers_min: int | None = None
    """Makes the group elastic."""
    slots: int = 2
    """Workers to a machine."""
    resize_every_s: float = 20.0
    load: Workload = field(default_factory=Workload)
    market: Market = field(default_factory=Market)
    faults: Faults = CALM
    wire: Wire = field(default_factory=Wire)
    limits: Limits = field(default_factory=Limits)
    keep: Keep = field(default_factory=Keep)
    vigil: Vigil = field(default_factory=Vigil)
    tempo: Tempo = field(default_factory=Tempo)
    laptop: Laptop = field(default_factory=Laptop)
    acts: tuple[Act, ...] = ()
    skew: float = 0.0005
    """By how much clocks run fast or slow, at most."""
    storm_s: float = 300.0
    """When the market, the bucket and the wire come to rest."""
    patience_s: float = 900.0
    """How long after that the run may take to end."""
    leave_s: float = 120.0
    """How long after its end machines may still cost money."""
    outcome: Literal["finished", "failed", "cancelled"] = "finished"
