"""Enums of `report()` and `get_all_reported_checkpoints()`. Names and values follow Ray Train.

Encoding of metrics as JSON, and back.

JSON has no NaN and no infinity. In messages and in the journal they are encoded as
`{"__float__": "nan"}`; `metrics_from_json` restores them before metrics are passed to user code.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from spotfit.core.codec import is_nested_deeper, nesting_depth
from spotfit.core.errors import ConfigError
from spotfit.core.units import format_bytes


class CheckpointUploadMode(enum.Enum):
    """How `report` uploads a checkpoint to the run's storage."""

    ASYNC = "ASYNC"
    """In a background thread, in the order of the reports. By default deletes the local copy."""
    SYNC = "SYNC"
    """Before `report` returns. By default keeps the local copy."""
    NO_UPLOAD = "NO_UPLOAD"
    """No upload: user code has already written the files below the run's root."""

    # The name of Ray Train, which its own code and copies of it call.
    def _default_delete_local_checkpoint_after_upload(self) -> bool:
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Until every report of this worker is committed."""
    VALIDATED = "VALIDATED"
    """Until, in addition, no validation is pending."""


class ReportedCheckpointStatus(enum.Enum):
    """The state of a reported checkpoint.

    COMMITTED without validation; otherwise PENDING_VALIDATION, then one of the other three.
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"


# --- Encoding of metrics as JSON, and back --------------------------------------------------------


MAX_METRICS_DEPTH = 100
"""How many dictionaries and lists within each other the metrics of a report may have."""
# Metrics are stored in the journal and sent to the callbacks, those of all ranks in one message.
MAX_METRICS_BYTES = 8 * 2**20
"""The largest metrics of one report, as JSON."""

_FLOAT_KEY = "__float__"
# Subclasses, such as enum or NumPy string types, are converted to the first type that matches.
_JSON_BASE_TYPES: tuple[type[Any], ...] = (list, tuple, str, int, float)


MAX_SAVE_ERROR_CHARS = 1_000
"""The longest reason why a rank could not save at the end: those of all ranks are in one entry."""
# User code can write to the socket of its worker. The integers fit into any JSON number.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class SaveAtEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank's Checkpointer when its training function had returned.

    If the ranks agree, their snapshots become a checkpoint: see `policy.save_at_end`.
    """

    step: _Count
    """Completed steps."""
    saved_step: _Count
    """The step of the last snapshot of the round, or of the checkpoint that it has started from.

    0 without both.
    """
    save_number: _Count = 0
    """The number of the save in its round, equal on all ranks that saved equally often."""
    has_snapshot: bool = False
    """Whether a snapshot was taken after the return; the `SnapshotReport` precedes this message."""
    has_newer_files: bool = False
    """Whether a checkpoint with files was reported after the last step."""
    state_digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Digest of samples of the state that is equal on all ranks; '' if the ranks may differ."""
    error: Annotated[str, msgspec.Meta(max_length=MAX_SAVE_ERROR_CHARS)] = ""
    """Why no snapshot could be taken."""
    metrics: msgspec.Raw = msgspec.Raw(b"{}")
    """The metrics of the last step."""


def metrics_to_json(metrics: Any, *, label: str = "metrics") -> bytes:
    """Encode the metrics of one report as a JSON object, for messages and the journal.

    NumPy scalars become numbers; NaN and infinities become {"__float__": "nan"}, see
    `metrics_from_json`. Raises `ConfigError` (a ValueError) with the path of the value, such as
    metrics['eval']['loss'], for torch tensors and all other values that JSON cannot represent, and
    if `metrics` is not a mapping, nested more than `MAX_METRICS_DEPTH` levels deep or larger than
    `MAX_METRICS_BYTES`. `label` is the name of the argument in that message.
    """
    # The check of the abstract class alone takes as long as the encoding.
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{label.capitalize()} must be a dictionary, not {type(metrics).__name__}.",
            do="Write report({'loss': loss}).",
        )
    try:
        body = _encode(metrics)
    except RecursionError as error:
        raise _too_deep(metrics, label) from error
    except (TypeError, ValueError, OverflowError) as error:
        path, reason = _find_unencodable(metrics, label, error)
        raise ConfigError(
            f"{path} cannot be reported: {reason}.",
            do="Report numbers and strings: loss.item() for a tensor, .tolist() for an array.",
            path=path,
        ) from error
    if is_nested_deeper(body, MAX_METRICS_DEPTH):
        raise _too_deep(metrics, label)
    # msgspec encodes NaN and infinities as null. The second pass is slower and rarely needed, so it
    # runs only if a null occurs (which may also be a None or part of a string).
    if b"null" in body:
        body = _encode(_mark_nonfinite(metrics))
    if len(body) > MAX_METRICS_BYTES:
        raise _too_large(metrics, label, len(body))
    return body


def metrics_to_plain_json(metrics: Any, *, label: str = "metrics") -> dict[str, Any]:
    """Return a copy of `metrics` that contains only JSON types, as all other processes receive it.

    NaN and infinities stay encoded as {"__float__": "nan"}. `label` names the argument in errors,
    such as "fn_kwargs". Raises `ConfigError` like `metrics_to_json`.
    """
    plain: dict[str, Any] = msgspec.json.decode(metrics_to_json(metrics, label=label))
    return plain


def metrics_from_json(plain: Any) -> Any:
    """Return a copy of a decoded JSON value in which NaN and infinities are floats again.

    Reverses the encoding of `metrics_to_json`. Called before metrics are passed to user code; None
    and other values that hold no such float are returned unchanged.
    """
    if isinstance(plain, dict):
        if plain.keys() == {_FLOAT_KEY}:
            return float(plain[_FLOAT_KEY])
        return {key: metrics_from_json(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [metrics_from_json(value) for value in plain]
    return plain


def _to_json_type(value: Any) -> Any:
    """Convert NumPy scalars, mappings and subclasses of JSON types. Raises `TypeError`
    otherwise."""
    # A 0-d tensor has .item(), too, but calling it would synchronize with the device unnoticed.
    if type(value).__module__.partition(".")[0] == "torch":
        raise TypeError("torch tensors are not accepted")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    for json_type in _JSON_BASE_TYPES:
        if isinstance(value, json_type):
            return json_type(value)
    raise TypeError(f"type {type(value).__name__} is not JSON serializable")


_encode = msgspec.json.Encoder(enc_hook=_to_json_type).encode


def _mark_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by `{"__float__": …}`, recursively."""
    if isinstance(value, Mapping):
        return {key: _mark_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark_nonfinite(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _mark_nonfinite(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_KEY: repr(float(value))}
    return value


def _too_deep(metrics: Mapping[Any, Any], label: str) -> ConfigError:
    depths = {f"{label}[{key!r}]": 1 + _depth(value) for key, value in metrics.items()}
    path = max(depths, key=depths.__getitem__)
    levels = f"{depths[path]} levels deep" if depths[path] < math.inf else "too deep, or in itself"
    return ConfigError(
        f"{path} cannot be reported: it is nested {levels}; the limit is {MAX_METRICS_DEPTH} "
        "levels of dictionaries and lists.",
        do="Report a flat dictionary, and save nested structures in the checkpoint.",
        path=path,
    )


def _depth(value: Any) -> float:
    """The nesting of one value; infinite beyond what the encoder can process."""
    try:
        return nesting_depth(_encode(value))
    except RecursionError:
        return math.inf
    except (TypeError, ValueError, OverflowError):  # the value of another key is reported
        return 0


def _too_large(metrics: Mapping[Any, Any], label: str, size_bytes: int) -> ConfigError:
    sizes = {f"{label}[{key!r}]": len(_encode(value)) for key, value in metrics.items()}
    path = max(sizes, key=sizes.__getitem__)
    return ConfigError(
        f"{label.capitalize()} cannot be reported: as JSON they have {format_bytes(size_bytes)}, "
        f"of which {path} has {format_bytes(sizes[path])}; the limit is "
        f"{format_bytes(MAX_METRICS_BYTES)}.",
        do="Report smaller values, and save large ones in the checkpoint.",
        path=path,
    )


def _find_unencodable(value: Any, path: str, error: Exception, depth: int = 0) -> tuple[str, str]:
    """The path of the innermost value that cannot be encoded, and the reason."""
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{n}]", item) for n, item in enumerate(value)]
    else:
        parts = []
    # The depth is limited because a container may contain itself.
    for name, item in parts if depth < 50 else []:
        try:
            _encode(item)
        except (TypeError, ValueError, OverflowError, RecursionError) as cause:
            return _find_unencodable(item, name, error=cause, depth=depth + 1)
    return path, str(error)
