"""Metrics to JSON and back. JSON has no NaN and no infinity; these survive the journey, too.

On the wire and in the journal such a number is `{"__float__": "nan"}`; whoever hands metrics to a
user restores them first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError

_MARK = "__float__"
_DERIVED_FROM: tuple[type[Any], ...] = (list, tuple, str, int, float)


def metrics_to_json(metrics: Any, *, what: str = "metrics") -> bytes:
    """The metrics of one report. Numbers of numpy count as numbers.

    Raises `ConfigError`, which is a ValueError, for torch tensors and whatever else is no JSON,
    and names its path.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{what.capitalize()} must be a dictionary, not a {type(metrics).__name__}.",
            do="Write report({'loss': loss}).",
        )
    try:
        body = _encode(metrics)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(metrics, what, error) from error
    if b"null" in body:
        body = _encode(_marked(metrics))
    return body


def plain_json(metrics: Any, *, what: str = "metrics") -> dict[str, Any]:
    """The same as `metrics_to_json`, decoded: what a reader of the JSON would see."""
    plain: dict[str, Any] = msgspec.json.decode(metrics_to_json(metrics, what=what))
    return plain


def metrics_from_json(plain: Any) -> Any:
    """What was reported, from decoded JSON: marked numbers become numbers again."""
    if isinstance(plain, dict):
        if plain.keys() == {_MARK}:
            return float(plain[_MARK])
        return {key: metrics_from_json(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [metrics_from_json(value) for value in plain]
    return plain


def _plain(thing: Any) -> Any:
    """What JSON takes instead of a number of numpy, or of a class derived from a known one."""
    if type(thing).__module__.partition(".")[0] == "torch":
        raise TypeError("torch tensors are refused: they would drag devices and graphs along")
    if getattr(thing, "shape", None) == () and hasattr(thing, "item"):
        return thing.item()
    if isinstance(thing, Mapping):
        return dict(thing)
    for known in _DERIVED_FROM:
        if isinstance(thing, known):
            return known(thing)
    raise TypeError(f"a {type(thing).__name__} is no JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def _marked(thing: Any) -> Any:
    """The same with every number that JSON does not know marked."""
    if isinstance(thing, Mapping):
        return {key: _marked(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_marked(value) for value in thing]
    if getattr(thing, "shape", None) == () and hasattr(thing, "item"):
        return _marked(thing.item())
    if isinstance(thing, float) and not math.isfinite(thing):
        return {_MARK: repr(float(thing))}
    return thing


def _refusal(metrics: Any, what: str, error: Exception) -> ConfigError:
    path, why = _culprit(metrics, what, error)
    return ConfigError(
        f"{path} cannot be reported: {why}.",
        do="Report plain numbers and texts: loss.item() for a tensor, .tolist() for an array.",
        path=path,
    )


def _culprit(thing: Any, path: str, error: Exception, depth: int = 0) -> tuple[str, str]:
    """The deepest part that cannot be encoded, and why."""
    if isinstance(thing, Mapping):
        parts = [(f"{path}[{key!r}]", value) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple)):
        parts = [(f"{path}[{n}]", value) for n, value in enumerate(thing)]
    else:
        parts = []
    for name, value in parts if depth < 50 else []:
        try:
            _encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as deeper:
            return _culprit(value, name, deeper, depth + 1)
    return path, str(error)
