"""Plugins (entry points of installed packages) and optional dependencies, imported on demand.

A missing dependency is reported as `MissingExtraError` with the `pip install` command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.core.input_checks import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


# Modules of the standard library that Windows lacks.
_UNIX_MODULES = frozenset({"fcntl", "grp", "pwd", "resource", "termios"})


def load(group: str, name: str, *, entry_points: Iterable[EntryPoint] | None = None) -> Any:
    """Import and return the object of the entry point `name` in `group`.

    For example the class of the provisioner 'aws_batch' in `"spotfit.provisioners"`. `entry_points`
    replace those of the installed packages (None). Raises `ConfigError` if no package or several
    packages provide it, or if it cannot be imported, and `MissingExtraError` if one of its
    dependencies is not installed. A plugin that needs Unix raises `ConfigError` on Windows.
    """
    offers = _entry_points(group) if entry_points is None else entry_points
    # By value: a package may appear twice in sys.path, with the same entry point.
    candidates = {point.value: point for point in offers if point.name == name}
    if not candidates:
        kind = group.rpartition(".")[2].removesuffix("s")  # 'provisioner' of 'spotfit.provisioners'
        suggestion = did_you_mean(name, (point.name for point in offers))
        raise ConfigError(
            f"There is no {kind} {name!r}. {suggestion}".rstrip(),
            do="Correct the name in the call, SPOTFIT_PROVISIONER or spotfit.toml, "
            f"or install the package that provides it as an entry point in {group!r}.",
        )
    # An arbitrary choice would change with the order of sys.path.
    if len(candidates) > 1:
        raise ConfigError(
            f"Several packages provide the entry point {name!r} in {group!r}: "
            f"{', '.join(sorted(candidates))}.",
            do="Uninstall all but one of these packages.",
        )
    return _load_entry_point(next(iter(candidates.values())))


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of all entry points in `group`, without importing them.

    `group` is for example `"spotfit.provisioners"`. Empty if no installed package provides one.
    """
    return tuple(sorted({point.name for point in _entry_points(group)}))


def _entry_points(group: str) -> EntryPoints:
    # Imported here because it takes tens of milliseconds and most processes load no plugin.
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _load_entry_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as missing:
        if missing.name in _UNIX_MODULES:
            raise ConfigError(
                f"The plugin {point.name!r} does not run on this system ({sys.platform}), which "
                f"lacks the module {missing.name!r}.",
                do="Run Python in WSL 2; or use a cloud backend, for example "
                "provisioner='aws_batch' or 'kubernetes'; or train in this process with "
                "ScalingConfig(num_workers=0).",
            ) from missing
        raise missing_extra_error(
            missing, feature=f"The plugin {point.name!r}", extra=point.name
        ) from missing
    except Exception as error:  # third-party code may raise anything on import
        raise ConfigError(
            f"The plugin {point.name!r} ({point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}",
            do=f"Update or reinstall the package that provides {point.value}.",
        ) from error


def require_module(module: str, *, extra: str) -> ModuleType:
    """Import and return the module of an optional dependency, for example `"pyarrow.fs"`.

    Raises `MissingExtraError` if it is not installed, with the command that installs `extra`, an
    extra of spotfit such as `"arrow"`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise missing_extra_error(missing, feature=module, extra=extra) from missing


def missing_extra_error(missing: ImportError, *, feature: str, extra: str) -> MissingExtraError:
    """Return, without raising it, the error for a dependency that could not be imported.

    `feature` begins the message ("pyarrow.fs needs …"); `extra` is the extra of spotfit that
    installs the dependency, as in `pip install 'spotfit[arrow]'`.
    """
    package = f"the package {missing.name!r}" if missing.name else "a package"
    return MissingExtraError(
        f"{feature} needs {package}, which is not installed: {missing}",
        do=f"Run `pip install 'spotfit[{extra}]'`.",
        module=missing.name,
    )
