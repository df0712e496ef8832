"""How a root becomes a client of obstore: endpoints, time limits, credentials, regions."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from spotfit.host import env
from spotfit.store.credentials import Keys
from spotfit.store.url import RootUrl

if TYPE_CHECKING:
    from obstore.store import (
        AzureConfig,
        AzureStore,
        ClientConfig,
        GCSConfig,
        GCSStore,
        RetryConfig,
        S3Config,
        S3CredentialProvider,
        S3Store,
    )

    Client: TypeAlias = S3Store | GCSStore | AzureStore

_CALL_WITHIN = timedelta(seconds=10)
_PART_WITHIN = timedelta(minutes=5)
_S3_ADDRESSES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_S3_UNSIGNED = "AWS_UNSIGNED_PAYLOAD"


def build(root: RootUrl, keys: Keys, *, insists: bool) -> Client:
    """A client that tries once, or one that `insists`: it repeats parts of a transfer for a while.

    `keys` are credentials; without them it finds those of the machine. Where there is an outer
    retry there must be none inside, hence the two.
    """
    limits, retries = _limits(insists=insists), _retries(insists=insists)
    match root.scheme:
        case "s3":
            return _s3(root, keys, limits, retries)
        case "gs":
            return _gcs(root, keys, limits, retries)
        case _:
            return _azure(root, keys, limits, retries)


def _limits(*, insists: bool) -> ClientConfig:
    # http is allowed because only the user's own endpoint can be http; the clouds' are https.
    return {"allow_http": True, "timeout": _PART_WITHIN if insists else _CALL_WITHIN}


def _retries(*, insists: bool) -> RetryConfig:
    if not insists:
        return {"max_retries": 0}
    return {"max_retries": 6, "retry_timeout": timedelta(minutes=2)}


def _s3(root: RootUrl, keys: Keys, limits: ClientConfig, retries: RetryConfig) -> S3Store:
    from obstore.store import S3Store

    config: S3Config = {"disable_bulk_delete": True}  # not every look-alike knows bulk deletion
    if root.endpoint:
        config["aws_endpoint_url_s3"] = root.endpoint
    if root.region:
        config["region"] = root.region
    if env.lookup(_S3_UNSIGNED) is None and _is_encrypted(root):
        config["unsigned_payload"] = True
    return S3Store(
        root.bucket,
        prefix=root.prefix or None,
        config=cast("S3Config", config | dict(keys)),
        client_options=limits,
        retry_config=retries,
        credential_provider=None if keys else _aws_profile(),
    )


def _is_encrypted(root: RootUrl) -> bool:
    """Whether TLS guards what is sent; else only the SHA-256 in a request's signature does."""
    addresses = (root.endpoint, *map(env.lookup, _S3_ADDRESSES))
    return not next(filter(None, addresses), "").startswith("http://")


def _gcs(root: RootUrl, keys: Keys, limits: ClientConfig, retries: RetryConfig) -> GCSStore:
    from obstore.store import GCSStore

    endpoint = {"base_url": root.endpoint} if root.endpoint else {}
    return GCSStore(
        root.bucket,
        prefix=root.prefix or None,
        config=cast("GCSConfig", endpoint | dict(keys)),
        client_options=limits,
        retry_config=retries,
    )


def _azure(root: RootUrl, keys: Keys, limits: ClientConfig, retries: RetryConfig) -> AzureStore:
    from obstore.store import AzureStore

    config: AzureConfig = {}
    if root.account:
        config["account_name"] = root.account
    if root.endpoint:
        config["endpoint"] = root.endpoint
    return AzureStore(
        root.bucket,
        prefix=root.prefix or None,
        config=cast("AzureConfig", config | dict(keys)),
        client_options=limits,
        retry_config=retries,
    )


def _aws_profile() -> S3CredentialProvider | None:
    """Credentials of `~/.aws`, profiles and single sign-on included, where boto3 can read them.

    Without that folder, or without boto3, obstore finds those of the environment and of the
    machine's role by itself; boto3 is asked only where it is needed, because it is slow to import.
    """
    if not (Path.home() / ".aws").is_dir() or importlib.util.find_spec("boto3") is None:
        return None
    from boto3.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None
