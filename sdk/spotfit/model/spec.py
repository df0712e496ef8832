"""RunSpec: everything about one `fit()` that never changes, as the journal keeps it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from spotfit.core.ids import RunId
from spotfit.model.cadence import Market


class Tempo(msgspec.Struct, frozen=True):
    """How fast the parts of a run breathe. All in seconds of one machine's own clock."""

    beat_s: float = 1.0
    """How often an agent and its leader greet each other over the wire."""
    silent_s: float = 10.0
    """A connected agent that has not been heard for so long is lost. No agent ever waits for the
    bucket or the cloud before it greets; only its machine and its wire may keep it silent."""
    lease_s: float = 5.0
    """How often the leader renews its lease object in the bucket."""
    lease_patience_s: float = 20.0
    """A lease unchanged for so long has no living owner."""
    settle_s: float = 0.5
    """After the first failure of a round: how long to listen, at most, for its true cause.

    Usually all machines have stopped or vanished long before, and then all is known."""
    stop_patience_s: float = 10.0
    """How long a killed worker may take to be gone before the next round opens without its node."""
    rejoin_s: float = 5.0
    """How long a new leader waits for the members of the last round to dial in."""
    boot_patience_s: float = 900.0
    """A machine said to run whose agent has not joined after so long is given up."""
    form_patience_s: float = 60.0
    """How long an elastic group waits for more machines than it needs at least."""
    observe_s: float = 2.0
    """How often the provisioner is asked about groups that are not all here."""
    upload_patience_s: float = 600.0
    """How long a round that is over is outlasted, at most, by the uploads its workers gave away."""
    orphan_s: float = 900.0
    """An agent that reaches neither a hub nor the bucket for so long ends: nobody needs it."""
    poll_s: float = 1.0
    """How often the journal is read by those whom nobody tells of new entries."""
    validator_patience_s: float = 300.0
    """How long a validation waits for a machine of its own before it may do without."""
    validator_idle_s: float = 60.0
    """How long a machine for validations is kept while there is nothing to validate."""


class Limits(msgspec.Struct, frozen=True):
    """How many failures of each kind a run may have; -1 is no limit."""

    worker: int = 0
    platform: int = -1
    preemption: int = -1
    preemption_grace_s: float = 0.0


class Keep(msgspec.Struct, frozen=True):
    """Which checkpoints stay."""

    last: int | None = None
    score: str | None = None
    order: Literal["max", "min"] = "max"


class Vigil(msgspec.Struct, frozen=True):
    """When workers are taken to hang. In seconds; 0 is for ever."""

    silent_s: float = 600.0
    """A worker that has not answered for so long counts as dead."""
    hang_s: float = 0.0
    """A round in which no rank has got on for so long is looked into."""
    hang_ends: bool = False
    """Whether it is ended then."""
    start_s: float = 1800.0
    """A round whose workers have not come to the function after so long is tried again."""


class ValidationSpec(msgspec.Struct, frozen=True):
    """Where validations run, what they need, and how long each may take at most."""

    own_machine: bool | None = None
    """True: only on a machine of their own; False: never; None: where one is to be had."""
    resources: dict[str, float] = {}
    timeout_s: float | None = None
    """Of those that were asked for without one of their own."""


class RunSpec(msgspec.Struct, frozen=True):
    """One `fit()`: what to run, how wide, on what, and within which limits."""

    run_id: RunId
    name: str
    fit_id: str
    """Digest of what the caller asked for: the same script run again has the same."""
    workers_min: int
    workers_max: int
    elastic: bool = False
    resize_every_s: float = 60.0
    resources_per_worker: dict[str, float] = {}
    limits: Limits = Limits()
    keep: Keep = Keep()
    framework: str = "none"
    framework_options: dict[str, Any] = {}
    luggage: dict[str, Any] = {}
    """`ship.Luggage` as plain data: where the sealed function, callbacks and code lie."""
    provisioner: str = "local"
    provisioner_options: dict[str, Any] = {}
    storage_url: str = ""
    """The run's root as the machines see it."""
    relax_collectives: bool = False
    collective_timeout_s: float | None = None
    collective_warn_s: float = 60.0
    """How often those who wait in one are told who is missing."""
    log_level: str = "INFO"
    callbacks: bool = False
    """Whether the luggage holds callbacks that want to hear of reports."""
    hooks: bool = False
    """Whether the luggage holds a backend whose hooks are called around the function."""
    share_devices: bool = False
    """Whether the workers of a node see each other's accelerators, whatever their framework."""
    vigil: Vigil = Vigil()
    tempo: Tempo = Tempo()
    market: Market = Market()
    validation: ValidationSpec | None = None
    """None where the luggage holds nothing to validate with."""
