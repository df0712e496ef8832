"""From a bucket behind a file system of pyarrow or fsspec to our own driver, and back to pyarrow.

Neither library is imported for the way in: an object is known by the module of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.host import env, extras
from spotfit.store.credentials import Keys
from spotfit.store.url import RootUrl, checked_key

_AZURE = "blob.core.windows.net"
_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_AWS_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def kinds_of(filesystem: Any) -> set[str]:
    """Its class and all that it derives from, with their modules."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(filesystem).__mro__}


def bucket_behind(filesystem: Any, path: str) -> tuple[RootUrl, Keys] | None:
    """The root at `path` of that file system, and the credentials it carries.

    None where it is no file system of a bucket that we have a driver for. Raises `ConfigError`
    where it gets its credentials in a way that cannot be passed on to machines.
    """
    kinds = kinds_of(filesystem)
    for kind, translate in _TRANSLATIONS.items():
        if kind in kinds:
            return translate(filesystem, path)
    return None


# ── pyarrow ──────────────────────────────────────────────────────────────────────────────────────


def _arrow_s3(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    made = _made_with(filesystem)
    if made["role_arn"]:
        raise _cannot_pass_on("S3FileSystem(role_arn=...)", "a profile or role of the machines")
    bucket, prefix = _split(path)
    keys = {
        "access_key_id": made["access_key"],
        "secret_access_key": made["secret_key"],
        "session_token": made["session_token"],
        "skip_signature": "true" if made["anonymous"] else "",
    }
    endpoint = _endpoint(made["scheme"], made["endpoint_override"])
    return RootUrl("s3", bucket, prefix, endpoint, made["region"]), _set(keys)


def _arrow_gcs(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    made = _made_with(filesystem)
    if made["access_token"] or made["target_service_account"]:
        raise _cannot_pass_on("A token of GcsFileSystem", "GOOGLE_APPLICATION_CREDENTIALS")
    bucket, prefix = _split(path)
    endpoint = _endpoint(made["scheme"], made["endpoint_override"])
    keys = {"skip_signature": "true" if made["anonymous"] else ""}
    return RootUrl("gs", bucket, prefix, endpoint), _set(keys)


def _arrow_azure(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    made = _made_with(filesystem)
    container, prefix = _split(path)
    account, authority = made["account_name"], made["blob_storage_authority"]
    own = authority.lstrip(".") != _AZURE
    endpoint = f"{made['blob_storage_scheme']}://{_azure_host(account, authority)}" if own else ""
    keys = {
        "account_key": made["account_key"],
        "sas_key": made["sas_token"],
        "client_id": made["client_id"],
        "client_secret": made["client_secret"],
        "tenant_id": made["tenant_id"],
    }
    return RootUrl("az", container, prefix, endpoint, account=account), _set(keys)


def _made_with(filesystem: Any) -> Mapping[str, Any]:
    """What it was made with, as it tells whoever copies it."""
    (made,) = filesystem.__reduce__()[1]
    return {name: value or "" for name, value in made.items()}


def _azure_host(account: str, authority: str) -> str:
    """A name of its own for each account, or one for all with the account as first folder."""
    return f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"


# ── fsspec ───────────────────────────────────────────────────────────────────────────────────────


def _s3fs(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    client = filesystem.client_kwargs or {}
    if (filesystem.kwargs or {}).get("profile"):
        raise _cannot_pass_on("S3FileSystem(profile=...)", "AWS_PROFILE, or a role of the machines")
    bucket, prefix = _split(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    keys = {
        "access_key_id": filesystem.key or client.get("aws_access_key_id"),
        "secret_access_key": filesystem.secret or client.get("aws_secret_access_key"),
        "session_token": filesystem.token or client.get("aws_session_token"),
        "skip_signature": "true" if filesystem.anon else "",
    }
    endpoint = filesystem.endpoint_url or client.get("endpoint_url") or ""
    scheme = "https" if filesystem.use_ssl else "http"
    root = RootUrl("s3", bucket, prefix, _endpoint(scheme, endpoint), client.get("region_name", ""))
    return root, _set(keys)


def _gcsfs(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    given = filesystem.storage_options
    token = given.get("token")
    bucket, prefix = _split(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    root = RootUrl("gs", bucket, prefix, _endpoint("https", given.get("endpoint_url") or ""))
    if isinstance(token, str | None) and token in _GOOGLE_KNOWS:
        return root, _GOOGLE_KNOWS[token]
    raise _cannot_pass_on(f"GCSFileSystem(token={type(token).__name__})", _GOOGLE)


_GOOGLE_KNOWS: Mapping[str | None, Keys] = {
    None: {},
    "google_default": {},
    "cloud": {},
    "anon": {"skip_signature": "true"},
}
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machines"


def _adlfs(filesystem: Any, path: str) -> tuple[RootUrl, Keys]:
    if filesystem.storage_options.get("credential"):
        raise _cannot_pass_on("AzureBlobFileSystem(credential=...)", "AZURE_STORAGE_ACCOUNT_KEY")
    container, prefix = _split(filesystem._strip_protocol(path))  # noqa: SLF001 - its own parser
    said = _of_connection(filesystem.connection_string or "")
    account = filesystem.account_name or said.get("AccountName") or ""
    keys = {
        "account_key": filesystem.account_key or said.get("AccountKey"),
        "sas_key": filesystem.sas_token or said.get("SharedAccessSignature"),
        "client_id": filesystem.client_id,
        "client_secret": filesystem.client_secret,
        "tenant_id": filesystem.tenant_id,
    }
    endpoint = said.get("BlobEndpoint", "").rstrip("/")
    return RootUrl("az", container, prefix, endpoint, account=account), _set(keys)


def _of_connection(text: str) -> dict[str, str]:
    """The fields of a connection string: 'AccountName=a;AccountKey=k'."""
    fields = (part.partition("=") for part in text.split(";") if part.strip())
    return {name.strip(): value for name, _, value in fields}


# ── both ─────────────────────────────────────────────────────────────────────────────────────────

_TRANSLATIONS: Mapping[str, Callable[[Any, str], tuple[RootUrl, Keys]]] = {
    "pyarrow._s3fs.S3FileSystem": _arrow_s3,
    "pyarrow._gcsfs.GcsFileSystem": _arrow_gcs,
    "pyarrow._azurefs.AzureFileSystem": _arrow_azure,
    "s3fs.core.S3FileSystem": _s3fs,
    "gcsfs.core.GCSFileSystem": _gcsfs,
    "adlfs.spec.AzureBlobFileSystem": _adlfs,
}


def _split(path: str) -> tuple[str, str]:
    if "://" in path:
        raise ConfigError(
            f"storage_path={path!r} holds a scheme, but storage_filesystem says which storage.",
            do="Give the path within the file system: 'bucket/folder'.",
        )
    bucket, _, prefix = path.strip("/").partition("/")
    if not bucket:
        raise ConfigError("The storage path names no bucket.", do="Write 'bucket/folder'.")
    return bucket, checked_key(prefix) if prefix else ""


def _endpoint(scheme: str, host: str) -> str:
    if not host or "://" in host:
        return host.rstrip("/")
    return f"{scheme or 'https'}://{host}".rstrip("/")


def _set(keys: Mapping[str, str | None]) -> Keys:
    return {name: value for name, value in keys.items() if value}


def _cannot_pass_on(what: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{what}: credentials found that way cannot be passed on to machines.",
        do=f"Use {instead}, and give the address as storage_path alone.",
    )


# ── back to pyarrow ──────────────────────────────────────────────────────────────────────────────


def arrow_for(root: RootUrl, keys: Keys) -> Any:
    """pyarrow's file system in which `root.path` means the same, opened with those credentials.

    None where pyarrow is not installed, or knows no such storage.
    """
    try:
        arrow = extras.need("pyarrow.fs", extra="arrow")
    except MissingExtraError:
        return None
    match root.scheme:
        case "file":
            return arrow.LocalFileSystem()
        case "s3":
            return _s3_in_arrow(arrow, root, keys)
        case "gs" if hasattr(arrow, "GcsFileSystem"):
            return _gcs_in_arrow(arrow, root, keys)
        case _:
            return None


def _s3_in_arrow(arrow: Any, root: RootUrl, keys: Keys) -> Any:
    endpoint = root.endpoint or _first(_AWS_ENDPOINTS)
    region = root.region or _first(_AWS_REGIONS)
    if not (endpoint or region or keys):
        return arrow.FileSystem.from_uri(str(root))[0]  # asks AWS where the bucket lies
    given: dict[str, Any] = _in_arrow_s3(keys)
    if region:
        given["region"] = region
    if endpoint:
        address = urlsplit(endpoint)
        given |= {"scheme": address.scheme, "endpoint_override": address.netloc + address.path}
    return arrow.S3FileSystem(**given)


def _in_arrow_s3(keys: Keys) -> dict[str, Any]:
    if "skip_signature" in keys:
        return {"anonymous": True}
    names = {"access_key_id": "access_key", "secret_access_key": "secret_key"}
    return {names.get(name, name): value for name, value in keys.items()}


def _gcs_in_arrow(arrow: Any, root: RootUrl, keys: Keys) -> Any:
    given: dict[str, Any] = {"anonymous": "skip_signature" in keys}
    if root.endpoint:
        address = urlsplit(root.endpoint)
        given |= {"scheme": address.scheme, "endpoint_override": address.netloc + address.path}
    return arrow.GcsFileSystem(**given)


def _first(names: tuple[str, ...]) -> str:
    return next((found for name in names if (found := env.lookup(name))), "")
