"""FrameworkCheckpoint: a checkpoint that knows what its files are. A leftover of old scripts."""

from __future__ import annotations

import warnings
from typing import Any

from spotfit.checkpoint.handle import Checkpoint
from spotfit.ship.function import pickled, unpickled

_PREPROCESSOR = "preprocessor_pkl"


class FrameworkCheckpoint(Checkpoint):
    """A checkpoint with a model in it, and perhaps what prepares its inputs."""

    def __init__(self, path: Any, filesystem: Any = None) -> None:
        super().__init__(path, filesystem)
        deprecated(f"{type(self).__name__} is deprecated: use spotfit.Checkpoint and its files.")

    def get_preprocessor(self) -> Any:
        """What was kept to prepare inputs, or None.

        It is unpickled, which can run any code: only ask a checkpoint whose origin you trust.
        """
        kept = self.get_metadata().get(_PREPROCESSOR)
        return None if kept is None else unpickled(bytes.fromhex(kept), what="preprocessor")

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Keep this in its metadata, pickled."""
        told = {"preprocessor": preprocessor}
        body = pickled(preprocessor, told_as=told, by_value_modules=()).body
        self.update_metadata({_PREPROCESSOR: body.hex()})


def deprecated(what: str) -> None:
    """Warn whoever called our caller."""
    warnings.warn(what, DeprecationWarning, stacklevel=3)
