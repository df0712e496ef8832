"""What a machine printed, as its backend kept it.

The bucket has what workers print, and what an agent logs stays on its machine. A machine that ends
before its agent has said anything leaves its reason only where its backend keeps output: an image
without spotfit, a library that is missing, a role that may not read the bucket.

A provisioner whose traits say `keeps_output` has one verb more, which may be called at any time, of
machines long gone as well:

    def said(self, handle: GroupHandle, node: int, *, last: int) -> Sequence[Said]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from spotfit.model.group import GroupHandle
from spotfit.provision.api import Provisioner


@dataclass(frozen=True, slots=True)
class Said:
    """The last lines of one life of a machine: it may have been started several times."""

    where: str
    """Where all of it is, in the backend's own words."""
    lines: tuple[str, ...] = ()


class KeepsOutput(Protocol):
    """What a provisioner with that trait can do, too."""

    def said(self, handle: GroupHandle, node: int, *, last: int) -> Sequence[Said]:
        """So many of the last lines, life by life, the oldest first. What is not told yet, or no
        longer, is left out: clouds are late, and forget."""
        ...


def said(
    provisioner: Provisioner, handle: GroupHandle, node: int, *, last: int = 200
) -> Sequence[Said]:
    """What that machine of the group printed; nothing where its backend keeps no output."""
    if not provisioner.traits.keeps_output:
        return ()
    return cast("KeepsOutput", provisioner).said(handle, node, last=last)


def tail(text: str, last: int) -> tuple[str, ...]:
    """So many of its last lines."""
    return tuple(text.splitlines()[-last:]) if last > 0 else ()
