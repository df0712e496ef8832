"""FrameworkCheckpoint: a checkpoint with a preprocessor, kept for compatibility with Ray Train."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.code.function_pickle import pickle_object, unpickle
from spotfit.core.lazy_names import is_loaded_instance

_JSON_KEY, _PICKLE_KEY = "preprocessor", "preprocessor_pkl"
"""Those of `spotfit.data.preprocessors`; the second one is Ray's."""


class FrameworkCheckpoint(Checkpoint):
    """A checkpoint that holds a model and optionally a preprocessor of its inputs. Deprecated."""

    def __init__(self, path: Any, filesystem: Any = None) -> None:
        super().__init__(path, filesystem)
        warn_deprecated(
            f"{type(self).__name__} is deprecated: use spotfit.Checkpoint and its files."
        )

    def get_preprocessor(self) -> Any:
        """Return the preprocessor in the checkpoint's metadata, or None if there is none.

        One that is not stored as JSON is unpickled, which can run arbitrary code: use it only with
        trusted checkpoints. Reads the storage at each call. Raises `ConfigError` if the JSON is
        damaged or of a later version.
        """
        metadata = self.get_metadata()
        encoded = metadata.get(_PICKLE_KEY)
        if encoded is None:
            return json_preprocessor(metadata)
        return unpickle(bytes.fromhex(encoded), description="preprocessor")

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Store the preprocessor in the checkpoint's metadata, replacing an earlier one.

        One of `spotfit.data.preprocessors` without functions as JSON, which is read from any
        `Checkpoint`; others are pickled. Writes to the storage at once.
        """
        base = "spotfit.data.preprocessors.preprocessor_base"
        if is_loaded_instance(preprocessor, base, "Preprocessor"):
            from spotfit.data.preprocessors import checkpoint_metadata

            metadata = checkpoint_metadata(preprocessor)
        else:
            parts = {"preprocessor": preprocessor}
            body = pickle_object(preprocessor, labeled_parts=parts, by_value_modules=()).body
            metadata = {_JSON_KEY: None, _PICKLE_KEY: body.hex()}
        self.update_metadata(metadata)


def json_preprocessor(metadata: Mapping[str, Any]) -> Any:
    """Return the preprocessor that is stored as JSON, or None. It runs no code of the checkpoint.

    Raises `ConfigError` if it is damaged or of a later version.
    """
    if metadata.get(_JSON_KEY) is None:
        return None
    # It needs PyArrow, which checkpoints without preprocessor do not.
    from spotfit.data.preprocessors import preprocessor_of_metadata

    return preprocessor_of_metadata(metadata)


def warn_deprecated(message: str) -> None:
    """Emit a `DeprecationWarning` with the line of the code that called the calling function."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)
