"""Credentials that came with a file system the user gave, on their way to the run's machines.

All others are those of each machine's own environment. These go in one variable of it, which
stands in no address, no object and no log.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.host import env
from spotfit.store.url import RootUrl

Keys = Mapping[str, str]
"""Settings of the driver, such as `access_key_id`."""


def of_environment(root: RootUrl) -> Keys:
    """What this machine was told to open the bucket of that root with; else nothing."""
    return _told(env.value(env.STORAGE_KEYS)).get(_bucket(root), {})


def as_text(root: RootUrl, keys: Keys) -> str:
    """The variable that tells machines; empty where there is nothing to tell."""
    return msgspec.json.encode({_bucket(root): keys}).decode() if keys else ""


def _bucket(root: RootUrl) -> str:
    return f"{root.scheme}://{root.bucket} {root.endpoint}"


@lru_cache(maxsize=4)
def _told(text: str) -> dict[str, dict[str, str]]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, dict[str, str]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise ConfigError(
            f"{env.STORAGE_KEYS.name} holds no credentials that could be read.",
            do="It is set by fit() for its machines; unset it elsewhere.",
        ) from None  # the text of the cause would show what is secret
