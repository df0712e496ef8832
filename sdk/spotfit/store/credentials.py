"""Storage credentials that a user passed with a file system, and their transfer to machines.

Without them, each machine uses the credentials of its own environment. Passed ones travel in one
environment variable (`SPOTFIT_STORAGE_KEYS`) and are never written to a URL, an object or a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.host import env
from spotfit.store.url import RootUrl

StorageCredentials = Mapping[str, str]
"""Options of the obstore client, such as `access_key_id`."""


def credentials_from_environment(root: RootUrl) -> StorageCredentials:
    """Return the credentials passed to this machine for the bucket of `root`; empty if none."""
    return _parse_credentials(env.read(env.STORAGE_KEYS)).get(_bucket_id(root), {})


def format_credentials(root: RootUrl, credentials: StorageCredentials) -> str:
    """Return the value of the variable for machines; '' without credentials."""
    return msgspec.json.encode({_bucket_id(root): credentials}).decode() if credentials else ""


def _bucket_id(root: RootUrl) -> str:
    # With the endpoint: two servers may have buckets of the same name.
    return f"{root.scheme}://{root.bucket} {root.endpoint}"


@lru_cache(maxsize=4)  # read for every client; tests and local mode change the variable
def _parse_credentials(text: str) -> dict[str, dict[str, str]]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, dict[str, str]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise ConfigError(
            f"{env.STORAGE_KEYS.name} is not a JSON object of credentials by bucket.",
            do="Unset it: fit() sets it on the machines it starts.",
        ) from None  # the cause's text would show secrets
