"""Arguments of Ray Train's V1 trainers for boosting, with which the trainer owns the loop.

Ray Train V2 rejects them beside a training function, and so does spotfit. Without a function, which
Ray's trainers of V2 require, they describe the whole training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spotfit.boosting.row_datasets import check_datasets
from spotfit.boosting.segments import DEFAULT_ROUNDS_PER_SEGMENT, check_booster, check_rounds
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import reject_deprecated_arguments, suggest_argument

_V1_ARGUMENTS = ("label_column", "params", "num_boost_round")


class OwnedLoop(NamedTuple):
    """A training that the trainer's own loop runs; see `docs/guides/xgboost.md`."""

    params: dict[str, Any]
    datasets: dict[str, Any]
    label_column: str
    num_boost_round: int
    rounds_per_segment: int
    train_kwargs: dict[str, Any]
    """Further arguments of the library's `train`."""


def parse_v1_arguments(
    trainer: str,
    train_loop: Callable[..., Any] | None,
    arguments: Mapping[str, Any],
    *,
    train_kwargs: Mapping[str, Any],
    known_kwargs: tuple[str, ...],
) -> OwnedLoop | None:
    """Return the training that the V1 arguments describe, or None with a training function.

    `arguments` are those of the constructor, by name. Raises `DeprecationWarning` for V1 arguments
    beside a function, as Ray Train V2 does, and `ConfigError` for missing or invalid ones.
    """
    if train_loop is not None:
        given = {name: arguments[name] for name in _V1_ARGUMENTS}
        replacement = f"train in the function, or pass no function to {trainer}"
        reject_deprecated_arguments(
            trainer, given, replacements=dict.fromkeys(given, replacement), unset=None
        )
        _reject_kwargs(trainer, {**_segments(arguments), **train_kwargs}, known=())
        return None
    params = arguments["params"]
    if params is None:
        raise ConfigError(
            f"{trainer}() has neither a training function nor params=.",
            do=f"Pass a function, or {trainer}(params=..., datasets=..., label_column=...).",
        )
    if not isinstance(params, Mapping):
        raise ConfigTypeError(
            f"{trainer}(params=...) must be a dictionary, not a {type(params).__name__}.",
            do="Write params={'learning_rate': 0.1}.",
        )
    check_booster(params)
    _reject_kwargs(trainer, train_kwargs, known=known_kwargs)
    rounds = 10 if arguments["num_boost_round"] is None else arguments["num_boost_round"]
    per_segment = arguments["rounds_per_segment"]
    per_segment = DEFAULT_ROUNDS_PER_SEGMENT if per_segment is None else per_segment
    check_rounds(per_segment, rounds)
    return OwnedLoop(
        params=dict(params),
        datasets=check_datasets(trainer, arguments["datasets"], arguments["label_column"]),
        label_column=arguments["label_column"],
        num_boost_round=rounds,
        rounds_per_segment=per_segment,
        train_kwargs=dict(train_kwargs),
    )


def _segments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    value = arguments["rounds_per_segment"]
    return {} if value is None else {"rounds_per_segment": value}


def _reject_kwargs(trainer: str, kwargs: Mapping[str, Any], *, known: tuple[str, ...]) -> None:
    for name in kwargs:
        if name not in known:
            raise ConfigTypeError(
                f"{trainer}() got an unexpected argument {name!r}.",
                do=suggest_argument(name, known) or "Pass it to train() in the training function.",
            )
