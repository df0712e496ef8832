"""How checkpoints are validated: what the user says of it. Checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean

_ACCELERATOR_SHARE = 0.001
_WITHOUT_EFFECT = frozenset(
    {"max_calls", "max_retries", "name", "retry_exceptions", "scheduling_strategy"}
)
"""Advice to a scheduler of tasks. There is none here, and nothing is wrong without it."""
_RESOURCES = frozenset({"num_cpus", "num_gpus", "memory", "accelerator_type", "resources"})


class TimeoutRefusedError(ConfigError, AssertionError):
    """A timeout that can never be met."""


class ValidationFn(Protocol):
    """Looks at a checkpoint and tells its metrics."""

    def __call__(self, checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
        """The metrics of that `Checkpoint`: plain numbers and texts, as `report` takes them."""
        ...


@dataclass
class ValidationTaskConfig:
    """How one checkpoint is validated: what `fn` is called with, and how long it may take.

    `fn_kwargs` that are given to `report` must be plain data that JSON can hold. `timeout_s`
    counts from the start of the validation's process; None is no limit.
    """

    fn_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.fn_kwargs is None:
            self.fn_kwargs = {}
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise TimeoutRefusedError(
                f"timeout_s should be None or greater than zero, not {self.timeout_s!r}.",
                do="None lets a validation take as long as it likes.",
            )


class ValidationConfig:
    """What validates the checkpoints that are reported with `report(..., validation=...)`.

    `fn(checkpoint, **fn_kwargs)` runs outside the workers, one checkpoint after the other.
    `ray_remote_kwargs` tell what it needs: `num_cpus`, `num_gpus`, `memory`, `accelerator_type`,
    `resources`; by default one CPU and no accelerator.

    `own_machine`: True asks for a machine of its own and waits for it; False lets it run beside
    the workers, on the leader's node; None asks for a machine and, where none is to be had, goes
    beside the workers.
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
                f"ValidationConfig(fn=...) takes a function, not a {type(fn).__name__}.",
                do="Write def validate(checkpoint): ..., and pass validate.",
            )
        self.fn = fn
        self.task_config = task_config or ValidationTaskConfig()
        self.ray_remote_kwargs = dict(ray_remote_kwargs or {})
        self.own_machine = own_machine
        _check_known(self.ray_remote_kwargs)

    @property
    def resources(self) -> dict[str, float]:
        """What one validation needs, in the words of `ScalingConfig(resources_per_worker=...)`."""
        asked = self.ray_remote_kwargs
        needs: dict[str, float] = {"CPU": _amount(asked, "num_cpus", 1)}
        needs["GPU"] = _amount(asked, "num_gpus", 0)
        needs["memory"] = _amount(asked, "memory", 0)
        if asked.get("accelerator_type"):
            needs[f"accelerator_type:{asked['accelerator_type']}"] = _ACCELERATOR_SHARE
        needs |= asked.get("resources") or {}
        return {name: amount for name, amount in needs.items() if amount}


def _check_known(asked: Mapping[str, Any]) -> None:
    known = _RESOURCES | _WITHOUT_EFFECT
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"ValidationConfig(ray_remote_kwargs={{{name!r}: ...}}) is not understood.",
                do=f"{did_you_mean(name, sorted(_RESOURCES))} The environment of the workers is "
                "that of validations, too.",
            )
    _amount(asked, "num_cpus", 1)
    _amount(asked, "num_gpus", 0)
    _amount(asked, "memory", 0)


def _amount(asked: Mapping[str, Any], name: str, usual: float) -> float:
    amount = asked.get(name)
    if amount is None:
        return usual
    if not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
        raise ConfigError(
            f"ValidationConfig(ray_remote_kwargs={{{name!r}: {amount!r}}}) is no amount.",
            do="Give a number that is not below zero.",
        )
    return amount
