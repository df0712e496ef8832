"""torchft: every worker meets itself alone in torch's own group, and the others through torchft."""

from __future__ import annotations

import msgspec

from spotfit.frameworks.api import Gather
from spotfit.frameworks.torch.backend import Torch
from spotfit.model.wire import Start


class Torchft(Torch):
    """A group of one for each worker, with the store that torchft's managers meet at.

    Ranks in the environment and of the context are those among all workers.
    """

    def enter(self, start: Start, gather: Gather) -> None:
        """Form it; others can reach its store at this node's address."""
        alone = msgspec.structs.replace(start, rank=0, world_size=1)
        super().enter(alone, lambda _, value: value)
