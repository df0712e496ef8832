"""The messages between an agent and the process that validates one checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.ids import RunId


class Assessment(msgspec.Struct, frozen=True):
    """What is to be validated, and with what. The one frame it reads; it holds the run's key."""

    storage_url: str
    luggage: dict[str, Any]
    secret: str
    run_id: RunId
    """The run that key is used for."""
    checkpoint: str
    kwargs: dict[str, Any] = {}
    """What goes on top of the trainer's."""
    devices: tuple[str, ...] = ()
    """The accelerators it may use."""
    scratch: str = ""
    run_name: str = ""
    log_level: str = "INFO"

    def __repr__(self) -> str:
        return f"Assessment({self.checkpoint!r} of {self.storage_url!r})"


class Verdict(msgspec.Struct, frozen=True):
    """What came of it: metrics, or why there are none.

    `again`: it never came to the user's function, for a reason that may pass.
    """

    metrics: dict[str, Any] | None = None
    told: str = ""
    again: bool = False
