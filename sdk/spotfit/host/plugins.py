"""Plugins, found by name through entry points: loaded when asked for, never silently missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit.host.extras import missing_extra

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


def load(group: str, name: str, *, found: Iterable[EntryPoint] | None = None) -> Any:
    """What the entry point `name` of `group` stands for.

    Raises `ConfigError` for a name that nobody or more than one distribution offers, and
    `MissingExtraError` when a dependency of the plugin is not installed.
    """
    offers = _entry_points(group) if found is None else found
    candidates = {point.value: point for point in offers if point.name == name}
    if not candidates:
        raise _unknown(group, name, (point.name for point in offers))
    if len(candidates) > 1:
        raise _clash(group, name, candidates)
    return _loaded(next(iter(candidates.values())))


def names(group: str) -> tuple[str, ...]:
    """What is on offer; nothing is loaded."""
    return tuple(sorted({point.name for point in _entry_points(group)}))


def _entry_points(group: str) -> EntryPoints:
    from importlib.metadata import entry_points  # dear, and what is ours needs none

    return entry_points(group=group)


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as missing:
        raise missing_extra(missing, what=f"The plugin {point.name!r}", extra=point.name) from (
            missing
        )
    except Exception as error:
        raise ConfigError(
            f"The plugin {point.name!r} ({point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}",
            do="Correct or update the package that brings it.",
        ) from error


def _unknown(group: str, name: str, known: Iterable[str]) -> ConfigError:
    kind = group.rpartition(".")[2].removesuffix("s")
    return ConfigError(
        f"There is no {kind} {name!r}. {did_you_mean(name, known)}".rstrip(),
        do=f"Correct the name, or install the package that offers it as a {group!r} entry point.",
    )


def _clash(group: str, name: str, candidates: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"Several packages offer {name!r} in {group!r}: {', '.join(sorted(candidates))}.",
        do="Uninstall all but one of them.",
    )
