"""The preprocessor in the metadata of a checkpoint, so that predictors find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.plans.transforms import DropColumns, SelectColumns
from spotfit.data.preprocessors import preprocessor_json
from spotfit.data.preprocessors.chain import Chain
from spotfit.data.preprocessors.preprocessor_base import Preprocessor, PreprocessorTransform
from spotfit.host import log

_JSON_KEY = "preprocessor"
_PICKLE_KEY = "preprocessor_pkl"
"""The key of Ray, and of `FrameworkCheckpoint`."""


def checkpoint_metadata(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return the metadata for `Checkpoint.update_metadata` that contains a preprocessor.

    It is JSON; a preprocessor with code is pickled, in hexadecimal digits. Raises `ShippingError`
    if its code cannot be pickled.
    """
    try:
        return {_JSON_KEY: preprocessor_json.to_fields(preprocessor), _PICKLE_KEY: None}
    except ConfigError:
        body = preprocessor_json.pickle_preprocessor(preprocessor)
        return {_JSON_KEY: None, _PICKLE_KEY: body.hex()}


def default_metadata(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the checkpoints of a trainer with these datasets.

    They contain the preprocessors that were applied to the dataset "train", as one. {} if there are
    none; also if they cannot be stored, which a log line reports.
    """
    train = datasets.get("train")
    if not isinstance(train, Dataset):
        return {}
    # Selections change no values, so that they may be left out.
    steps = [one for one in train.steps or () if not isinstance(one, SelectColumns | DropColumns)]
    applied = [isinstance(step, PreprocessorTransform) for step in steps]
    if not any(applied):
        return {}
    first, count = applied.index(True), sum(applied)
    if not all(applied[first : first + count]):
        return _not_stored("another function is applied between two preprocessors")
    parts = [step.preprocessor for step in steps[first : first + count]]
    preprocessor = parts[0] if count == 1 else Chain(*parts)
    try:
        return {_JSON_KEY: preprocessor_json.to_fields(preprocessor), _PICKLE_KEY: None}
    except ConfigError as error:
        return _not_stored(error.message)


def _not_stored(reason: str) -> dict[str, Any]:
    log.info(
        "data.preprocessor_not_stored",
        dataset="train",
        reason=reason,
        do="Call checkpoint.update_metadata(checkpoint_metadata(preprocessor)).",
    )
    return {}


def preprocessor_of_metadata(
    metadata: Mapping[str, Any], *, trusted: bool = False
) -> Preprocessor | None:
    """Return the preprocessor of a checkpoint's metadata, or None if it has none.

    A pickle runs code when it is read: it is refused (`ConfigError`) unless `trusted`. Raises
    `ConfigError` also if the metadata is damaged or of a later version.
    """
    found: Preprocessor | None = None
    if (fields := metadata.get(_JSON_KEY)) is not None:
        found = preprocessor_json.from_fields(fields)
    elif (encoded := metadata.get(_PICKLE_KEY)) is not None:
        found = preprocessor_json.unpickle_preprocessor(bytes.fromhex(encoded), trusted=trusted)
    return found
