"""`RunConfig`: name, storage, failure handling and callbacks of a run."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import (
    DEPRECATED,
    ErrorCollector,
    reject_deprecated_arguments,
    suggest_keywords,
)
from spotfit.core.units import parse_seconds
from spotfit.host import system
from spotfit.model.config import CheckpointConfig, FailureConfig, LoggingConfig
from spotfit.model.user_callback import UserCallback

if TYPE_CHECKING:
    from spotfit.checkpoint.checkpoint_dir import StorageLocation
    from spotfit.store.api import Store
    from spotfit.worker.training_api import StorageContext

DEFAULT_STORAGE_PATH = "~/spotfit_results"
_REMOVED_FIELDS = {
    "sync_config": "remove it, files are uploaded directly to storage_path",
    "verbose": "use RunConfig(logging_config=LoggingConfig(log_level=...))",
    "stop": "return from the training function",
    "progress_reporter": "remove it, fit() prints the progress; a UserCallback processes reports",
    "log_to_file": "remove it, output is always stored; read it with attach(url).logs()",
}
_CONFIG_TYPES: tuple[tuple[str, type[Any]], ...] = (
    ("failure_config", FailureConfig),
    ("checkpoint_config", CheckpointConfig),
    ("logging_config", LoggingConfig),
)


@suggest_keywords
@dataclass
class RunConfig:
    """Name, storage, failure handling and callbacks of a run.

    `name`: default is a unique name with date and time. Calling `fit()` with the name and
    storage_path of an earlier run continues that run from its latest checkpoint.
    `storage_path`: a directory or a URL (s3://, gs://, az://, file://), which is stored as text;
    default `~/spotfit_results`. `storage_filesystem`: a pyarrow or fsspec file system that contains
    it.
    `worker_runtime_env`: packages and environment variables of the workers.
    `time_budget_s`: the longest duration of one `fit()`, in seconds or as a `timedelta`, including
    waits for machines; default no limit. At the limit a `Checkpointer` saves, the machines are
    released, and `fit()` raises `TimeBudgetExceededError`; another `fit()` continues the run.
    `deadline`: when the training is to be finished: a duration from the call of `fit()`, such as
    "60h" or a `timedelta`, or a `datetime` with a time zone. Machines are then chosen by price so
    that the deadline is kept.
    `budget_usd`: limit of the cost of the machines of the run, in all its fits. Before it is
    exceeded a `Checkpointer` saves, the machines are released, and `fit()` raises
    `BudgetExhaustedError`; another `fit()` with a larger budget continues the run.
    `fallback`: "on_demand" rents on-demand machines where the deadline requires it or, without a
    deadline, where spot machines are refused, and returns to spot machines; "never" does not.
    Default: "on_demand" with a deadline, else "never".
    `training_time_s`: how long the training takes with all workers, in seconds, as text such as
    "40h" or as a `timedelta`. Once the progress was measured, the longer one of both counts.
    `preload`: installed modules that machines import once, before they start workers, such as
    ("tokenizers", "my_package.models"): in addition to those of the training framework, and to
    those that the training function is seen to use. They must not compute, nor start threads, when
    they are imported. None: only those of the framework.
    Raises `ConfigError` for invalid values, and `DeprecationWarning` for removed arguments.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[UserCallback] | None = None
    worker_runtime_env: dict[str, Any] | None = None
    logging_config: LoggingConfig | None = None
    sync_config: Any = DEPRECATED
    verbose: Any = DEPRECATED
    stop: Any = DEPRECATED
    progress_reporter: Any = DEPRECATED
    log_to_file: Any = DEPRECATED
    time_budget_s: float | timedelta | None = field(default=None, kw_only=True)
    deadline: float | str | timedelta | datetime | None = field(default=None, kw_only=True)
    budget_usd: float | None = field(default=None, kw_only=True)
    fallback: Literal["on_demand", "never"] | None = field(default=None, kw_only=True)
    training_time_s: float | str | timedelta | None = field(default=None, kw_only=True)
    preload: Sequence[str] | None = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        # Before the other checks: a script with a removed field was written for older versions.
        removed = {name: getattr(self, name) for name in _REMOVED_FIELDS}
        reject_deprecated_arguments("RunConfig", removed, replacements=_REMOVED_FIELDS)
        errors = ErrorCollector()
        for option, config_type in _CONFIG_TYPES:
            value = getattr(self, option)
            if value is None:
                setattr(self, option, config_type())
            elif not isinstance(value, config_type):
                text = f"Invalid `{option}` type: {qualified_type_name(value)}."
                remedy = f"Write RunConfig({option}=spotfit.{config_type.__name__}(...))."
                errors.add(ConfigError(text, do=remedy))
        self.callbacks = errors.check(lambda: _check_callbacks(self.callbacks))
        self.worker_runtime_env = errors.check(lambda: _check_runtime_env(self.worker_runtime_env))
        self.time_budget_s = errors.check(lambda: _check_time_budget(self.time_budget_s))
        self.deadline = errors.check(lambda: _check_deadline(self.deadline))
        self.budget_usd = errors.check(lambda: _check_budget(self.budget_usd))
        self.fallback = errors.check(lambda: _check_fallback(self.fallback))
        self.training_time_s = errors.check(lambda: _check_training_time(self.training_time_s))
        self.preload = errors.check(lambda: _check_preload(self.preload))
        path: Any = self.storage_path
        if path is None:
            self.storage_path = str(Path(DEFAULT_STORAGE_PATH).expanduser())
        elif isinstance(path, (str, os.PathLike)):
            self.storage_path = str(os.fspath(path))
        else:
            type_name = qualified_type_name(path)
            text = (
                f"RunConfig(storage_path={path!r}): storage_path must be a str or a Path, not a "
                f"{type_name}."
            )
            errors.add(
                ConfigError(text, do="Pass a directory, or a URL like 's3://bucket/prefix'.")
            )
        # The time makes the name unique: a name that is used again would continue its run.
        name: Any = self.name or f"spotfit_run-{system.utc_timestamp()}"
        if not isinstance(name, str):
            text = f"RunConfig(name={name!r}): name must be a str, not {qualified_type_name(name)}."
            errors.add(ConfigError(text, do="Pass a plain name: name='experiment-1'."))
        self.name = name
        errors.raise_all()

    @property
    def storage_context(self) -> StorageContext:
        """The storage of this run, as in Ray Train. For developers of integrations.

        Opens storage_path at each access. Raises `ConfigError` if it is invalid.
        """
        # Imported on use, like the stores below: `import spotfit` imports this module and is cheap.
        from spotfit.worker.training_api import StorageContext

        assert self.name is not None
        return StorageContext(open_run_storage(self).subtree(self.name), self.name)


def open_run_storage(run: RunConfig) -> Store:
    """Open the store at storage_path, which contains one directory per run.

    With storage_filesystem, storage_path is a path in it. Raises `ConfigError` for an invalid path
    or file system.
    """
    from spotfit.store.factory import open_store
    from spotfit.store.filesystem import open_filesystem_store

    assert isinstance(run.storage_path, str)
    if run.storage_filesystem is not None:
        return open_filesystem_store(run.storage_filesystem, run.storage_path)
    return open_store(run.storage_path, setting="RunConfig(storage_path=...)")


def resolve_filesystem_location(run: RunConfig) -> StorageLocation | None:
    """Return the run's directory in storage_filesystem; None if that is not set. Does no I/O."""
    if run.storage_filesystem is None:
        return None
    assert isinstance(run.storage_path, str)
    assert run.name is not None
    from spotfit.checkpoint.checkpoint_dir import StorageLocation

    return StorageLocation(posixpath.join(run.storage_path, run.name), run.storage_filesystem)


def check_config_type(
    name: str, value: Any, expected_type: type[Any], *, module: str = "spotfit"
) -> Any:
    """Return `value` if it is an `expected_type`, or a default `expected_type()` for None.

    `name` is the trainer's argument, such as "scaling_config", and `module` the module that exports
    the type; both are used in the error. Raises `ConfigError` if the value has another type.
    """
    if value is None:
        return expected_type()
    if not isinstance(value, expected_type):
        type_name = f"{module}.{expected_type.__name__}"
        raise ConfigError(
            f"{name} must be a {type_name}, not {qualified_type_name(value)}.",
            do=f"Write {name}={type_name}(...).",
        )
    return value


def qualified_type_name(value: Any) -> str:
    """Return the class name of `value` with its module, such as "ray.train.ScalingConfig".

    For error messages; without the module for built-in types. The module distinguishes classes of
    Ray from ours, which have the same names.
    """
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def _check_callbacks(callbacks: Any) -> list[UserCallback]:
    if callbacks is None:
        return []
    # A Sequence, not an Iterable: an iterator would be consumed by the checks.
    if not isinstance(callbacks, Sequence):
        raise ConfigError(
            f"RunConfig(callbacks={callbacks!r}): callbacks must be a list, not "
            f"{qualified_type_name(callbacks)}.",
            do="Write callbacks=[MyCallback()].",
        )
    invalid = [each for each in callbacks if not isinstance(each, UserCallback)]
    if invalid:
        raise ConfigError(
            f"RunConfig(callbacks=...) contains {invalid[0]!r}, which is not an instance of "
            "spotfit.UserCallback.",
            do="Derive the class of the callback from UserCallback, and pass an instance.",
        )
    return list(callbacks)


def _check_time_budget(budget: Any) -> float | None:
    if budget is None:
        return None
    seconds = budget.total_seconds() if isinstance(budget, timedelta) else budget
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(
            f"RunConfig(time_budget_s={budget!r}): time_budget_s must be a number of seconds "
            "greater than 0, or a timedelta.",
            do="Write time_budget_s=72 * 3600 or timedelta(hours=72), or omit it for no limit.",
        )
    return float(seconds)


def _check_deadline(deadline: Any) -> timedelta | datetime | None:
    """Return a duration from the call of `fit()`, or a time in UTC."""
    if isinstance(deadline, str):
        deadline = _parse_time(deadline)
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise ConfigError(
                f"RunConfig(deadline={deadline!r}) has no time zone.",
                do="Pass a datetime with a time zone, such as datetime.now().astimezone() + "
                "timedelta(hours=60).",
            )
        return deadline.astimezone(UTC)
    remedy = "Write deadline='60h', timedelta(hours=60), or a datetime with a time zone."
    seconds = _check_duration("deadline", deadline, remedy)
    return None if seconds is None else timedelta(seconds=seconds)


def _parse_time(text: str) -> datetime | str:
    """Return the time of ISO 8601 text such as '2026-11-30T18:00+01:00', else the text."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


def _check_duration(name: str, value: Any, remedy: str) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, str):
        seconds = parse_seconds(seconds, setting=f"RunConfig({name}={value!r})")
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(
            f"RunConfig({name}={value!r}) must be a duration greater than 0.", do=remedy
        )
    return float(seconds)


def _check_training_time(value: Any) -> float | None:
    remedy = "Write training_time_s='40h', a number of seconds, or timedelta(hours=40)."
    return _check_duration("training_time_s", value, remedy)


def _check_budget(budget: Any) -> float | None:
    if budget is None:
        return None
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not is_number or not math.isfinite(budget) or budget <= 0:
        raise ConfigError(
            f"RunConfig(budget_usd={budget!r}): budget_usd must be a number of US dollars greater "
            "than 0.",
            do="Write budget_usd=40, or omit it for no limit.",
        )
    return float(budget)


def _check_fallback(fallback: Any) -> Any:
    if fallback in (None, "on_demand", "never"):
        return fallback
    raise ConfigError(
        f"RunConfig(fallback={fallback!r}): fallback must be 'on_demand' or 'never'.",
        do="Write fallback='on_demand' to rent on-demand machines where spot does not suffice.",
    )


def _check_preload(preload: Any) -> tuple[str, ...] | None:
    if preload is None:
        return None
    modules = tuple(preload) if isinstance(preload, Sequence) else (preload,)
    if isinstance(preload, str) or not all(_is_module_name(module) for module in modules):
        raise ConfigError(
            f"RunConfig(preload={preload!r}): preload must be a list or tuple of module names.",
            do="Write preload=('my_package.models',) with names as in an import statement.",
        )
    return modules


def _is_module_name(value: Any) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _check_runtime_env(runtime_env: Any) -> dict[str, Any]:
    if runtime_env is None:
        return {}
    if not isinstance(runtime_env, dict):
        raise ConfigError(
            "RunConfig(worker_runtime_env=...): worker_runtime_env must be a dictionary, not "
            f"{qualified_type_name(runtime_env)}.",
            do="Write {'env_vars': {...}, 'pip': [...]}.",
        )
    return dict(runtime_env)  # a copy: the caller's dictionary may change before fit()
