"""The messages between an agent and its zygote, one a packet; sockets travel beside them."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["worker", "audience", "hooks", "carrier", "validation"]
"""What a child will be: it runs the user's function, his callbacks, his hooks, it uploads, or it
validates a checkpoint."""


class Bear(msgspec.Struct, frozen=True, tag="bear"):
    """Fork a child. Beside it come three descriptors: its socket, its output, its errors."""

    serial: int
    """The asker's own number for the child."""
    what: Kind = "worker"


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """What every worker needs is imported: from now on a fork is at once."""


class Ripe(msgspec.Struct, frozen=True, tag="ripe"):
    """What a worker's first steps want is imported, too."""


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """This process must not fork; its workers are to be started one by one."""

    why: str


class Born(msgspec.Struct, frozen=True, tag="born"):
    """The child lives, in a process group of its own that has its number."""

    serial: int
    pid: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The child is reaped, and whatever was left of its group is killed."""

    serial: int
    pid: int
    status: int
    """As `waitpid` gives it."""


FromZygote = Awake | Ripe | Unfit | Born | Gone
