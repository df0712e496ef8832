"""No framework: the function runs on every rank and meets nobody but us."""

from __future__ import annotations

from spotfit.frameworks.api import Gather
from spotfit.frameworks.place import place
from spotfit.model.wire import Start


class Alone:
    """Nothing to import, nothing to form."""

    stages: tuple[tuple[str, ...], ...] = ()
    beside_peers = False

    def environment(self, start: Start) -> dict[str, str]:
        return place(start, beside_peers=self.beside_peers)

    def enter(self, start: Start, gather: Gather) -> None:
        """There is no group."""

    def leave(self) -> None:
        """There is no group."""
