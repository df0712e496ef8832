"""FrameworkCheckpoint: a checkpoint with a preprocessor, kept for compatibility with Ray Train."""

from __future__ import annotations

import warnings
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.code.function_pickle import pickle_object, unpickle

_PREPROCESSOR = "preprocessor_pkl"


class FrameworkCheckpoint(Checkpoint):
    """A checkpoint that holds a model and optionally a preprocessor of its inputs. Deprecated."""

    def __init__(self, path: Any, filesystem: Any = None) -> None:
        super().__init__(path, filesystem)
        warn_deprecated(
            f"{type(self).__name__} is deprecated: use spotfit.Checkpoint and its files."
        )

    def get_preprocessor(self) -> Any:
        """Return the preprocessor in the checkpoint's metadata, or None if there is none.

        It is unpickled, which can run arbitrary code: use it only with trusted checkpoints. Reads
        the storage at each call.
        """
        encoded = self.get_metadata().get(_PREPROCESSOR)
        if encoded is None:
            return None
        return unpickle(bytes.fromhex(encoded), description="preprocessor")

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Pickle the preprocessor into the checkpoint's metadata, replacing an earlier one.

        Writes to the storage at once.
        """
        parts = {"preprocessor": preprocessor}
        body = pickle_object(preprocessor, labeled_parts=parts, by_value_modules=()).body
        self.update_metadata({_PREPROCESSOR: body.hex()})


def warn_deprecated(message: str) -> None:
    """Emit a `DeprecationWarning` with the line of the code that called the calling function."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)
