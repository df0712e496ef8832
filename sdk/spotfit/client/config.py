"""RunConfig: the name of a run, where it is kept, and what it may survive."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfit.core.deprecated import DEPRECATED, refuse_deprecated
from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit.host import clocks
from spotfit.model.callbacks import UserCallback
from spotfit.model.config import CheckpointConfig, FailureConfig, LoggingConfig

if TYPE_CHECKING:
    from spotfit.checkpoint.handle import Address
    from spotfit.store.api import Store
    from spotfit.worker.context import StorageContext

STORAGE_PATH = "~/spotfit_results"
_GONE = {
    "sync_config": "files go straight to storage_path, there is nothing left to sync",
    "verbose": "say RunConfig(logging_config=LoggingConfig(log_level=...))",
    "stop": "return from the training function",
    "progress_reporter": "fit() shows the run, and a UserCallback hears its reports",
    "log_to_file": "output is always kept, see attach(url).logs()",
}
_KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("failure_config", FailureConfig),
    ("checkpoint_config", CheckpointConfig),
    ("logging_config", LoggingConfig),
)


@dataclass
class RunConfig:
    """The name of a run, where it is kept, and what it may survive.

    Without a name it gets one of its own, with date and time. The same name and storage path again
    continue the old run. `storage_path` is a directory or a URL (s3://, gs://, az://, file://);
    `~/spotfit_results` if none is given.
    """

    name: str | None = None
    storage_path: str | None = None
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

    def __post_init__(self) -> None:
        gone = {name: getattr(self, name) for name in _GONE}
        refuse_deprecated("RunConfig", gone, instead=_GONE)
        mistakes = Mistakes()
        for name, kind in _KINDS:
            setattr(self, name, mistakes.check(partial(_checked, name, getattr(self, name), kind)))
        self.callbacks = mistakes.check(lambda: _checked_callbacks(self.callbacks))
        self.worker_runtime_env = mistakes.check(lambda: _checked_env(self.worker_runtime_env))
        self.storage_path = mistakes.check(lambda: _checked_path(self.storage_path))
        self.name = mistakes.check(lambda: _checked_name(self.name))
        mistakes.raise_all()

    @property
    def storage_context(self) -> StorageContext:
        """Where the run of that name is kept. For developers of integrations."""
        from spotfit.worker.context import StorageContext

        assert self.name is not None
        return StorageContext(storage_of(self).under(self.name), self.name)


def storage_of(run: RunConfig) -> Store:
    """Rooted at its storage path, which holds a folder for each run. Raises `ConfigError`."""
    from spotfit.store.filesystem import store_on
    from spotfit.store.opening import open_store

    assert run.storage_path is not None
    if run.storage_filesystem is not None:
        return store_on(run.storage_filesystem, run.storage_path)
    return open_store(run.storage_path)


def place_of(run: RunConfig) -> Address | None:
    """Where the run lies in the file system the user gave; None where that is ours to choose."""
    if run.storage_filesystem is None:
        return None
    assert run.storage_path is not None
    assert run.name is not None
    from spotfit.checkpoint.handle import Address

    return Address(posixpath.join(run.storage_path, run.name), run.storage_filesystem)


def typed(name: str, given: Any, kind: type[Any], *, home: str = "spotfit") -> Any:
    """What was given, or the usual one. Raises `ConfigError` where it is of another kind."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise ConfigError(
            f"{name} must be a {home}.{kind.__name__}, not {kind_of(given)}.",
            do=f"Write {name}={home}.{kind.__name__}(...).",
        )
    return given


def kind_of(given: Any) -> str:
    """The name of its class, with the module: one of another library may be called the same."""
    kind = type(given)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _checked(name: str, given: Any, kind: type[Any]) -> Any:
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise ConfigError(
            f"Invalid `{name}` type: {kind_of(given)}.", do=f"Give a spotfit.{kind.__name__}."
        )
    return given


def _checked_callbacks(callbacks: Any) -> list[UserCallback]:
    if callbacks is None:
        return []
    if not isinstance(callbacks, Sequence):
        raise ConfigError(
            f"callbacks must be a list, not a {kind_of(callbacks)}.", do="Write callbacks=[...]."
        )
    strangers = [one for one in callbacks if not isinstance(one, UserCallback)]
    if strangers:
        raise ConfigError(
            f"callbacks holds {strangers[0]!r}, which is no instance of spotfit.UserCallback.",
            do="Derive its class from UserCallback, and pass an instance.",
        )
    return list(callbacks)


def _checked_env(runtime_env: Any) -> dict[str, Any]:
    if runtime_env is None:
        return {}
    if not isinstance(runtime_env, dict):
        raise ConfigError(
            f"worker_runtime_env must be a dictionary, not {runtime_env!r}.",
            do="Write {'env_vars': {...}, 'pip': [...]}.",
        )
    return dict(runtime_env)


def _checked_path(path: Any) -> str:
    if path is None:
        return str(Path(STORAGE_PATH).expanduser())
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"storage_path must be a text or a Path, not {path!r}.",
            do="Give a directory, or a URL like 's3://bucket/prefix'.",
        )
    return str(os.fspath(path))


def _checked_name(name: Any) -> str:
    if not name:
        return f"spotfit_run-{clocks.wall_stamp()}"
    if not isinstance(name, str):
        raise ConfigError(f"The run's name must be a text, not {name!r}.", do="Give a plain name.")
    return name
