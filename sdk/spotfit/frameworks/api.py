"""What a training library needs from us: names to import early, an environment, a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spotfit.model.wire import Start

Gather = Callable[[str, bytes], bytes]
"""Of a kind: everybody gives bytes and receives those of rank 0, once all ranks have come."""


class Framework(Protocol):
    """How one library is told who it is and whom to meet. Lives in the user's process."""

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Modules to import before a worker exists: first what it cannot begin without, then what
        its first steps will want. None of them may start threads or touch an accelerator."""
        ...

    @property
    def beside_peers(self) -> bool:
        """Whether a worker sees the accelerators of its node's other workers beside its own."""
        ...

    def environment(self, start: Start) -> dict[str, str]:
        """Variables to set before the library is used, or anything of the user's is loaded.

        Raises `ConfigError` where this node has not what the worker asked for.
        """
        ...

    def enter(self, start: Start, gather: Gather) -> None:
        """Form the group of this round. Raises what the library raises."""
        ...

    def leave(self) -> None:
        """Leave the group, with patience but not for ever; may be called without `enter`."""
        ...
