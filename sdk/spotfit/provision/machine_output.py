"""Console output of machines, as stored by their backend.

Workers' output is in the bucket, and an agent's log is on its machine. If a machine fails before
its agent has joined the run (an image without spotfit, a missing library, a role that may not read
the bucket), only the backend's copy of the console output shows the reason.

A provisioner with `Traits.keeps_output` implements `MachineOutputReader`. It may be called at any
time, also for terminated machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from spotfit.model.group import GroupHandle
from spotfit.provision.api import Provisioner


@dataclass(frozen=True, slots=True)
class MachineOutput:
    """The last lines of one attempt; a backend may start a machine several times."""

    source: str
    """Where the complete output is stored, in the backend's terms."""
    lines: tuple[str, ...] = ()


class MachineOutputReader(Protocol):
    """The additional method of a provisioner with `Traits.keeps_output`."""

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> Sequence[MachineOutput]:
        """Return the last `max_lines` lines of every attempt, oldest attempt first.

        Output that the backend does not have yet, or has deleted, is missing.
        """


def fetch_machine_output(
    provisioner: Provisioner, handle: GroupHandle, node: int, *, max_lines: int = 200
) -> Sequence[MachineOutput]:
    """Return the output of machine `node` of the group; empty if the backend keeps no output."""
    if not provisioner.traits.keeps_output:
        return ()
    return cast("MachineOutputReader", provisioner).fetch_machine_output(
        handle, node, max_lines=max_lines
    )


def last_lines(text: str, max_lines: int) -> tuple[str, ...]:
    """Return the last `max_lines` lines of `text`."""
    # A slice that starts at -0 would return all lines.
    return tuple(text.splitlines()[-max_lines:]) if max_lines > 0 else ()
