"""From a name and options to a provisioner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from spotfit.core.errors import ConfigError
from spotfit.host import plugins
from spotfit.provision.api import Provisioner

GROUP = "spotfit.provisioners"


def open_provisioner(name: str, options: Mapping[str, Any] | None = None) -> Provisioner:
    """The backend of that name with those options: the keywords of its `with_options`.

    Raises `ConfigError` for an unknown name, naming the nearest, and for options it does not take;
    `MissingExtraError` where a package is missing.
    """
    kind = plugins.load(GROUP, name)
    try:
        return cast("Provisioner", kind.with_options(**(options or {})))
    except TypeError as wrong:
        given = ", ".join(options or {}) or "none"
        raise ConfigError(
            f"The provisioner {name!r} does not take these options ({given}): {wrong}",
            do=f"See the options of {kind.__name__}.",
        ) from wrong


def provisioner_names() -> tuple[str, ...]:
    """What is on offer here."""
    return plugins.names(GROUP)
