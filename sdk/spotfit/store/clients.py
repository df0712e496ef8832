"""Creation of obstore clients from roots: endpoints, timeouts, credentials and regions."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from spotfit.host import env
from spotfit.store.credentials import StorageCredentials
from spotfit.store.url import RootUrl

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3CredentialProvider, S3Store

    ObstoreClient: TypeAlias = S3Store | GCSStore | AzureStore

# Calls move up to 8 MiB and are retried by `store.retry`: after 10 s another attempt is faster.
_CALL_TIMEOUT = timedelta(seconds=10)
# A part of 8 MiB or more over a slow link. Interrupting it would lose the bytes sent so far.
_TRANSFER_TIMEOUT = timedelta(minutes=5)
_S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_UNSIGNED_PAYLOAD_VARIABLE = "AWS_UNSIGNED_PAYLOAD"


def build_client(
    root: RootUrl, credentials: StorageCredentials, *, for_transfers: bool
) -> ObstoreClient:
    """Return a client that makes one attempt, or one that retries the parts of transfers.

    Empty `credentials` make obstore use those of the machine.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    arguments: dict[str, Any] = {
        "prefix": root.prefix or None,
        # http is allowed because only a user's own endpoint can be http; the clouds use https.
        "client_options": {
            "allow_http": True,
            "timeout": _TRANSFER_TIMEOUT if for_transfers else _CALL_TIMEOUT,
        },
        # `store.retry` repeats whole calls; retries of both would multiply. Only parts of a
        # transfer are repeated here, because repeating the call would send all parts again.
        "retry_config": {"max_retries": 6, "retry_timeout": timedelta(minutes=2)}
        if for_transfers
        else {"max_retries": 0},
    }
    match root.scheme:
        case "s3":
            arguments["config"] = {**_s3_config(root), **credentials}
            # A credential provider would take precedence over the credentials in the config.
            arguments["credential_provider"] = None if credentials else _aws_profile_credentials()
            return S3Store(root.bucket, **arguments)
        case "gs":
            endpoint = {"base_url": root.endpoint} if root.endpoint else {}
            arguments["config"] = {**endpoint, **credentials}
            return GCSStore(root.bucket, **arguments)
        case _:
            options = {"account_name": root.account, "endpoint": root.endpoint}
            named = {name: value for name, value in options.items() if value}
            arguments["config"] = {**named, **credentials}
            return AzureStore(root.bucket, **arguments)


def _s3_config(root: RootUrl) -> dict[str, Any]:
    # Not every S3-compatible server supports bulk deletion.
    config: dict[str, Any] = {"disable_bulk_delete": True}
    if root.endpoint:
        config["aws_endpoint_url_s3"] = root.endpoint
    if root.region:
        config["region"] = root.region
    # Hashing each body for its signature takes a third of an upload's CPU time. TLS already
    # protects the body in transit; over http the signature is its only protection (0039).
    # Without an endpoint in the root, obstore reads it from the same variables.
    addresses = (root.endpoint, *map(env.lookup, _S3_ENDPOINT_VARIABLES))
    uses_tls = not next(filter(None, addresses), "").startswith("http://")
    if uses_tls and env.lookup(_UNSIGNED_PAYLOAD_VARIABLE) is None:
        config["unsigned_payload"] = True
    return config


def _aws_profile_credentials() -> S3CredentialProvider | None:
    """Return boto3's credentials from `~/.aws`, including profiles and single sign-on.

    None without that folder or boto3: obstore itself finds credentials in the environment and of
    the machine's role.
    """
    # boto3 takes a second to import, so it is only used where obstore cannot do the same.
    if not (Path.home() / ".aws").is_dir() or importlib.util.find_spec("boto3") is None:
        return None
    from boto3.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None
