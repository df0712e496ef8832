"""User-facing configuration of checkpoint validation, with the interface of Ray Train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean, suggest_keywords

# As in `config`: any number of validations fits on a machine that has the accelerator type.
_ACCELERATOR_TYPE_AMOUNT = 0.001
# Options of Ray's task scheduler. They do not change the result, so they are accepted and ignored.
_IGNORED_OPTIONS = frozenset(
    {"max_calls", "max_retries", "name", "retry_exceptions", "scheduling_strategy"}
)
_RESOURCE_OPTIONS = frozenset({"num_cpus", "num_gpus", "memory", "accelerator_type", "resources"})


class InvalidTimeoutError(ConfigError, AssertionError):
    """A timeout that is not positive. Also an `AssertionError`, which Ray Train raises here."""


class ValidationFn(Protocol):
    """A function that evaluates a checkpoint and returns metrics."""

    def __call__(self, checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the metrics of the `Checkpoint`: values that `report` accepts."""
        ...


@suggest_keywords
@dataclass
class ValidationTaskConfig:
    """The arguments and the time limit of one validation.

    `fn_kwargs` passed to `report` must be JSON serializable. `timeout_s` counts from the start of
    the validation process; None means no limit.
    """

    fn_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.fn_kwargs is None:
            self.fn_kwargs = {}
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidTimeoutError(
                f"ValidationTaskConfig(timeout_s={self.timeout_s!r}): timeout_s should be None or "
                "greater than zero.",
                do="Write the seconds that one validation may take, or None for no time limit.",
            )


@suggest_keywords
class ValidationConfig:
    """How checkpoints reported with `report(..., validation=...)` are validated.

    `fn(checkpoint, **fn_kwargs)` runs outside the workers, one checkpoint at a time, in the order
    of the commits. `ray_remote_kwargs` sets its resources: `num_cpus`, `num_gpus`, `memory`,
    `accelerator_type`, `resources`; by default one CPU and no accelerator.

    `own_machine`: True waits for a dedicated machine; False runs beside the workers on the leader's
    node; None requests a dedicated machine and falls back to the leader's node. Raises
    `ConfigError` for invalid arguments.
    """

    def __init__(
        self,
        fn: Callable[..., dict[str, Any]],
        task_config: ValidationTaskConfig | None = None,
        ray_remote_kwargs: dict[str, Any] | None = None,
        *,
        own_machine: bool | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(
                f"ValidationConfig(fn=...) must be a function, not {type(fn).__name__}.",
                do="Define def validate(checkpoint): ... and pass fn=validate.",
            )
        self.fn = fn
        self.task_config = task_config or ValidationTaskConfig()
        self.ray_remote_kwargs = dict(ray_remote_kwargs or {})
        self.own_machine = own_machine
        for name in self.ray_remote_kwargs:
            if name not in _RESOURCE_OPTIONS | _IGNORED_OPTIONS:
                raise ConfigError(
                    f"ValidationConfig(ray_remote_kwargs={{{name!r}: ...}}) is not supported.",
                    do=f"{did_you_mean(name, sorted(_RESOURCE_OPTIONS))} Validations run in the "
                    "environment of the workers.",
                )
        # Checked here, where the user passes them, rather than when the first machine is requested.
        for name in ("num_cpus", "num_gpus", "memory"):
            _amount(self.ray_remote_kwargs, name, 0)

    @property
    def resources(self) -> dict[str, float]:
        """The resources of one validation by name, without zero amounts, such as {"CPU": 1.0}.

        In the format of `ScalingConfig(resources_per_worker=...)`; "memory" is in bytes. Entries of
        `ray_remote_kwargs["resources"]` override the others. One CPU by default.
        """
        options = self.ray_remote_kwargs
        resources: dict[str, float] = {
            "CPU": _amount(options, "num_cpus", 1),
            "GPU": _amount(options, "num_gpus", 0),
            "memory": _amount(options, "memory", 0),
        }
        if options.get("accelerator_type"):
            resources[f"accelerator_type:{options['accelerator_type']}"] = _ACCELERATOR_TYPE_AMOUNT
        resources |= options.get("resources") or {}
        return {name: amount for name, amount in resources.items() if amount}


def _amount(options: Mapping[str, Any], name: str, default: float) -> float:
    amount = options.get(name)
    if amount is None:
        return default
    if not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
        raise ConfigError(
            f"ValidationConfig(ray_remote_kwargs={{{name!r}: {amount!r}}}) must be a non-negative "
            "number.",
            do=f"Set {name!r} to a finite number >= 0.",
        )
    return amount
