"""Translation between file systems of buckets (pyarrow, fsspec) and `RootUrl`s with credentials.

Translating a file system imports neither library: objects are recognized by the module of their
class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.host import env, plugins
from spotfit.store.url import RootUrl, StorageCredentials, validate_key

_AZURE_AUTHORITY = "blob.core.windows.net"
_AWS_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_AWS_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")


def qualified_class_names(filesystem: Any) -> set[str]:
    """Return the qualified names of the class of `filesystem` and of all its base classes.

    They identify the kind of file system, for example `"s3fs.core.S3FileSystem"`, without an import
    of fsspec or pyarrow.
    """
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(filesystem).__mro__}


def resolve_bucket(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials] | None:
    """Return the root at `path` of a pyarrow or fsspec file system, and its explicit credentials.

    `path` is `"bucket/folder"`. None if it is not a file system of a supported bucket (S3, GCS,
    Azure). The credentials are options of obstore, empty if the file system uses those of the
    machine. Raises `ConfigError` if `path` is invalid, or if its credentials cannot be passed on to
    machines, such as those of a profile. Sends no request.
    """
    kinds = qualified_class_names(filesystem)
    for kind, translate in _RESOLVERS.items():
        if kind in kinds:
            return translate(filesystem, path)
    return None


# ── pyarrow ──────────────────────────────────────────────────────────────────────────────────────


def _resolve_arrow_s3(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    arguments = _constructor_arguments(filesystem)
    if arguments["role_arn"]:
        raise _untransferable_credentials_error(
            "S3FileSystem(role_arn=...)", "a profile or role of the machines"
        )
    bucket, prefix = _split_bucket_path(path)
    credentials = {
        "access_key_id": arguments["access_key"],
        "secret_access_key": arguments["secret_key"],
        "session_token": arguments["session_token"],
        "skip_signature": "true" if arguments["anonymous"] else "",
    }
    endpoint = _endpoint_url(arguments["scheme"], arguments["endpoint_override"])
    return RootUrl("s3", bucket, prefix, endpoint, arguments["region"]), _drop_empty(credentials)


def _resolve_arrow_gcs(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    arguments = _constructor_arguments(filesystem)
    if arguments["access_token"] or arguments["target_service_account"]:
        raise _untransferable_credentials_error(
            "A token of GcsFileSystem", "GOOGLE_APPLICATION_CREDENTIALS"
        )
    bucket, prefix = _split_bucket_path(path)
    endpoint = _endpoint_url(arguments["scheme"], arguments["endpoint_override"])
    credentials = {"skip_signature": "true" if arguments["anonymous"] else ""}
    return RootUrl("gs", bucket, prefix, endpoint), _drop_empty(credentials)


def _resolve_arrow_azure(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    arguments = _constructor_arguments(filesystem)
    container, prefix = _split_bucket_path(path)
    account, authority = arguments["account_name"], arguments["blob_storage_authority"]
    # An account is a subdomain, or on servers such as Azurite the first folder of the path.
    host = f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"
    is_azure = authority.lstrip(".") == _AZURE_AUTHORITY
    endpoint = "" if is_azure else f"{arguments['blob_storage_scheme']}://{host}"
    credentials = {
        "account_key": arguments["account_key"],
        "sas_key": arguments["sas_token"],
        "client_id": arguments["client_id"],
        "client_secret": arguments["client_secret"],
        "tenant_id": arguments["tenant_id"],
    }
    return RootUrl("az", container, prefix, endpoint, account=account), _drop_empty(credentials)


def _constructor_arguments(filesystem: Any) -> Mapping[str, Any]:
    # pyarrow has no accessors for them, but pickles a file system as its arguments.
    (arguments,) = filesystem.__reduce__()[1]
    return {name: value or "" for name, value in arguments.items()}


# ── fsspec ───────────────────────────────────────────────────────────────────────────────────────


def _resolve_s3fs(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    client = filesystem.client_kwargs or {}
    if (filesystem.kwargs or {}).get("profile"):
        raise _untransferable_credentials_error(
            "S3FileSystem(profile=...)", "AWS_PROFILE, or a role of the machines"
        )
    bucket, prefix = _split_bucket_path(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    credentials = {
        "access_key_id": filesystem.key or client.get("aws_access_key_id"),
        "secret_access_key": filesystem.secret or client.get("aws_secret_access_key"),
        "session_token": filesystem.token or client.get("aws_session_token"),
        "skip_signature": "true" if filesystem.anon else "",
    }
    endpoint = filesystem.endpoint_url or client.get("endpoint_url") or ""
    scheme = "https" if filesystem.use_ssl else "http"
    root = RootUrl(
        "s3", bucket, prefix, _endpoint_url(scheme, endpoint), client.get("region_name", "")
    )
    return root, _drop_empty(credentials)


def _resolve_gcsfs(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    token = filesystem.credentials.token  # storage_options has no positional arguments
    endpoint = filesystem.storage_options.get("endpoint_url") or ""
    bucket, prefix = _split_bucket_path(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    root = RootUrl("gs", bucket, prefix, _endpoint_url("https", endpoint))
    if isinstance(token, str | None) and token in _GCS_TOKEN_CREDENTIALS:
        return root, _GCS_TOKEN_CREDENTIALS[token]
    raise _untransferable_credentials_error(
        f"GCSFileSystem(token={type(token).__name__})", _GCS_ALTERNATIVES
    )


# Other tokens are files, browser logins or objects, which exist on the user's machine only.
_GCS_TOKEN_CREDENTIALS: Mapping[str | None, StorageCredentials] = {
    None: {},
    "google_default": {},
    "cloud": {},
    "anon": {"skip_signature": "true"},
}
_GCS_ALTERNATIVES = "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machines"


def _resolve_adlfs(filesystem: Any, path: str) -> tuple[RootUrl, StorageCredentials]:
    if filesystem.storage_options.get("credential"):
        raise _untransferable_credentials_error(
            "AzureBlobFileSystem(credential=...)", "AZURE_STORAGE_ACCOUNT_KEY"
        )
    container, prefix = _split_bucket_path(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    # A connection string such as 'AccountName=a;AccountKey=k'; keys are base64 and may end in '='.
    parts = (part.partition("=") for part in (filesystem.connection_string or "").split(";"))
    fields = {name.strip(): value for name, _, value in parts}
    account = filesystem.account_name or fields.get("AccountName") or ""
    credentials = {
        "account_key": filesystem.account_key or fields.get("AccountKey"),
        "sas_key": filesystem.sas_token or fields.get("SharedAccessSignature"),
        "client_id": filesystem.client_id,
        "client_secret": filesystem.client_secret,
        "tenant_id": filesystem.tenant_id,
    }
    endpoint = fields.get("BlobEndpoint", "").rstrip("/")
    return RootUrl("az", container, prefix, endpoint, account=account), _drop_empty(credentials)


# ── both ─────────────────────────────────────────────────────────────────────────────────────────

# Names instead of isinstance(): the libraries are optional and slow to import.
_RESOLVERS: Mapping[str, Callable[[Any, str], tuple[RootUrl, StorageCredentials]]] = {
    "pyarrow._s3fs.S3FileSystem": _resolve_arrow_s3,
    "pyarrow._gcsfs.GcsFileSystem": _resolve_arrow_gcs,
    "pyarrow._azurefs.AzureFileSystem": _resolve_arrow_azure,
    "s3fs.core.S3FileSystem": _resolve_s3fs,
    "gcsfs.core.GCSFileSystem": _resolve_gcsfs,
    "adlfs.spec.AzureBlobFileSystem": _resolve_adlfs,
}


def _split_bucket_path(path: str) -> tuple[str, str]:
    if "://" in path:
        raise ConfigError(
            f"The path {path!r} has a scheme, but the file system that was passed with it already "
            "selects the storage.",
            do="Pass the path within the file system: 'bucket/folder' as storage_path or as the "
            "path of a Checkpoint.",
        )
    bucket, _, prefix = path.strip("/").partition("/")
    if not bucket:
        raise ConfigError(
            f"The path {path!r} in the file system has no bucket before the folder.",
            do="Write storage_path='bucket/folder', Checkpoint('bucket/run/checkpoint_000001', …) "
            "or Result.from_path('bucket/run', …).",
        )
    try:
        return bucket, validate_key(prefix) if prefix else ""
    except ConfigError as error:
        raise ConfigError(
            f"The path {path!r} in the file system is invalid: {error.message}",
            do="Correct storage_path, or the path of the Checkpoint or of Result.from_path.",
        ) from error


def _endpoint_url(scheme: str, host: str) -> str:
    if not host or "://" in host:
        return host.rstrip("/")
    return f"{scheme or 'https'}://{host}".rstrip("/")


def _drop_empty(credentials: Mapping[str, str | None]) -> StorageCredentials:
    return {name: value for name, value in credentials.items() if value}


def _untransferable_credentials_error(what: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{what}: credentials of this kind cannot be passed on to machines.",
        do=f"Use {instead}, and pass the address as storage_path alone.",
    )


# ── back to pyarrow ──────────────────────────────────────────────────────────────────────────────


def open_arrow_filesystem(root: RootUrl, credentials: StorageCredentials) -> Any:
    """Return pyarrow's file system in which `root.path` is the same location.

    `credentials` are options of obstore, empty for those of the machine. None if pyarrow is not
    installed, or does not support the storage. May look up the region of an S3 bucket over the
    network.
    """
    try:
        arrow = plugins.require_module("pyarrow.fs", extra="arrow")
    except MissingExtraError:
        return None
    match root.scheme:
        case "file":
            return arrow.LocalFileSystem()
        case "s3":
            return _open_arrow_s3(arrow, root, credentials)
        case "gs" if hasattr(arrow, "GcsFileSystem"):  # builds of pyarrow may omit it
            return arrow.GcsFileSystem(
                anonymous="skip_signature" in credentials, **_arrow_endpoint(root.endpoint)
            )
        case _:
            return None


def _open_arrow_s3(arrow: Any, root: RootUrl, credentials: StorageCredentials) -> Any:
    endpoint = root.endpoint or _first_variable_set(_AWS_ENDPOINT_VARIABLES)
    region = root.region or _first_variable_set(_AWS_REGION_VARIABLES)
    if not (endpoint or region or credentials):
        return arrow.FileSystem.from_uri(str(root))[0]  # looks up the region of the bucket
    arguments: dict[str, Any] = {"region": region} if region else {}
    if "skip_signature" in credentials:
        arguments["anonymous"] = True
    else:
        names = {"access_key_id": "access_key", "secret_access_key": "secret_key"}
        arguments |= {names.get(name, name): value for name, value in credentials.items()}
    return arrow.S3FileSystem(**arguments, **_arrow_endpoint(endpoint))


def _arrow_endpoint(endpoint: str) -> dict[str, str]:
    # pyarrow expects the scheme separately; without an endpoint it uses the cloud's own.
    address = urlsplit(endpoint)
    options = {"scheme": address.scheme, "endpoint_override": address.netloc + address.path}
    return options if endpoint else {}


def _first_variable_set(names: tuple[str, ...]) -> str:
    return next((found for name in names if (found := env.lookup(name))), "")
