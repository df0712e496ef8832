"""Parsing and validation of storage addresses (`RootUrl`) and object keys.

Storage credentials that a user passed with a file system, and their transfer to machines.

Without them, each machine uses the credentials of its own environment. Passed ones travel in one
environment variable (`SPOTFIT_STORAGE_KEYS`) and are never written to a URL, an object or a log.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean
from spotfit.host import env

PARTIAL_FILE_PREFIX = ".spotfit-part-"
"""Prefix of the names of partially written files. They are not objects, and no key may have it."""

# A part of a key: not '.' or '..', not a partial file, no '/', control character or surrogate. A
# local directory must be able to store every key, and a bucket every name of a file.
_SEGMENT = (
    rf"(?!\.{{1,2}}(?:/|$))(?!{re.escape(PARTIAL_FILE_PREFIX)})[^/\x00-\x1f\x7f\ud800-\udfff]+"
)
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
# pyarrow and Hadoop use other names for the same schemes.
_ALIASES = {"gcs": "gs", "s3a": "s3"}
_ENDPOINT_OPTIONS = frozenset({"endpoint_override", "endpoint_url", "scheme"})
_OPTIONS: Mapping[str, frozenset[str]] = {
    "s3": _ENDPOINT_OPTIONS | {"region"},
    "gs": _ENDPOINT_OPTIONS,
    "az": _ENDPOINT_OPTIONS | {"account_name"},
    "file": frozenset(),
    "memory": frozenset(),
}
_URL_PREFIXES = tuple(f"{scheme}://" for scheme in _OPTIONS)
# 'C:/', 'C:\\', or '//server/share/' of a Windows path. A scheme has at least two letters here.
_WINDOWS_ROOT = re.compile(r"[A-Za-z]:(?=[/\\]|$)|//[^/]+/[^/]+")
# Windows refuses these in file names, or takes them for parts of another path.
_NOT_IN_WINDOWS_NAMES = re.compile(r'[<>:"\\|?*]|[. ](?=/|$)')


def validate_key(key: str) -> str:
    """Return `key` unchanged if it is a valid object key or folder. Raises `ConfigError` otherwise.

    Valid keys are relative, such as `"checkpoint_000001/model.pt"`, without parts that are empty,
    '.' or '..', contain control characters, or start with `PARTIAL_FILE_PREFIX`.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{key!r} is not a valid object key: a key is relative, its parts are separated by "
            "single '/', and no part is '.' or '..', has control characters or bytes that are not "
            f"UTF-8, or starts with {PARTIAL_FILE_PREFIX!r}.",
            do="Rename the file or folder of that name, or correct the path.",
        )
    return key


def validate_file_key(key: str) -> str:
    """Return `key` unchanged if it is a valid object key and file name. Raises `ConfigError`.

    On Windows, parts of a file name contain none of `<>:"\\|?*` and do not end with '.' or a space.
    """
    validate_key(key)
    if sys.platform == "win32" and (found := _NOT_IN_WINDOWS_NAMES.search(key)):
        raise ConfigError(
            f"{key!r} is not a valid file name on Windows, because of {found[0]!r}.",
            do="Read it on Linux or macOS or in WSL 2, or write it under another name.",
        )
    return key


@dataclass(frozen=True, slots=True)
class RootUrl:
    """Address of a root, without credentials.

    `str(root)` is readable and parses to an equal `RootUrl`; for a local directory it is the plain
    path. `endpoint` is the full URL of a server other than the cloud's.
    """

    scheme: str
    bucket: str = ""
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    account: str = ""

    @classmethod
    def parse(cls, text: str | Path, *, setting: str = "The storage address") -> RootUrl:
        """Parse a storage address of the user: a URL or the path of a local directory.

        URLs are `s3://`, `gs://`, `az://`, `file://` and `memory://`; a relative path is resolved
        against the working directory. Sends no request. Buckets accept the options of pyarrow's
        URIs, `?endpoint_override=host:port&scheme=http` and `&region=…`, or
        `?endpoint_url=http://host:port`. Raises `ConfigError`; its text begins with `setting`, the
        source of the address, and omits everything that may be a secret.
        """
        try:
            return _parse_local_path(str(text)) if isinstance(text, Path) else _parse_root(text)
        except ConfigError as error:
            raise ConfigError(f"{setting} is invalid: {error.message}", do=error.do) from None

    @property
    def path(self) -> str:
        """The address without scheme: 'bucket/folder', or the absolute path of a directory.

        Paths of Windows have '/', too: 'C:/folder', '//server/share/folder'.
        """
        if self.scheme == "file":
            path = self.prefix if _is_windows_path(self.prefix) else f"/{self.prefix}"
            return f"{path}/" if path.endswith(":") else path  # 'C:' is not the root of the drive
        return f"{self.bucket}/{self.prefix}".rstrip("/")

    def join(self, prefix: str) -> RootUrl:
        """Return the root of the folder `prefix` below this one.

        Raises `ConfigError` if it is invalid.
        """
        validate_key(prefix)
        return replace(self, prefix=f"{self.prefix}/{prefix}" if self.prefix else prefix)

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.path
        address = (
            f"{self.scheme}://{self.bucket}/{quote(self.prefix, safe=_UNQUOTED_CHARACTERS)}".rstrip(
                "/"
            )
        )
        endpoint = urlsplit(self.endpoint)
        options = {
            "endpoint_override": endpoint.netloc + endpoint.path,
            "scheme": endpoint.scheme,
            "region": self.region,
            "account_name": self.account,
        }
        query = {name: value for name, value in options.items() if value}
        return f"{address}?{urlencode(query, safe=':/[]')}" if query else address


# Only '?', '#' and '%' must be quoted to be parsed again; quoting more would be unreadable.
_UNQUOTED_CHARACTERS = " !\"$&'()*+,-./:;<=>@[\\]^_`{|}~"


def _parse_root(text: str) -> RootUrl:
    named = _SCHEME.match(text)
    if named is None or _is_windows_path(text):
        return _parse_local_path(text)
    scheme = _ALIASES.get(named[1].lower(), named[1].lower())
    if scheme not in _OPTIONS:
        # Half of a short name is '://', which makes unrelated ones similar.
        hint = did_you_mean(f"{scheme}://", _URL_PREFIXES, min_similarity=0.75)
        raise ConfigError(
            f"The storage address {text!r} has the scheme {named[1]!r}, which is not supported.",
            do=f"{hint} A plain path is a local directory; write './' in front of a path that "
            "contains a colon.",
        )
    if not named[2]:
        raise ConfigError(f"two slashes are missing after {named[1]}:.", do=f"Write {named[1]}://…")
    if scheme == "file":
        return _parse_file_url(text)
    return _parse_bucket_url(scheme, text)


def _parse_local_path(text: str) -> RootUrl:
    if not text.strip() or "\x00" in text:
        problem = "contains a NUL character" if text.strip() else "is empty"
        raise ConfigError(
            f"the path {text!r} {problem}.",
            do=f"Pass a directory or a URL: {', '.join(_URL_PREFIXES)}.",
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"'~' in {text!r} cannot be replaced by a home directory: {error}",
            do="Write the absolute path.",
        ) from error
    return RootUrl("file", prefix=absolute_prefix(Path.cwd() / path))


def absolute_prefix(path: PurePath) -> str:
    """Return the `RootUrl.prefix` of an absolute path, which contains '/' on every system.

    '/data/runs' gives 'data/runs', and 'C:\\runs' on Windows 'C:/runs'. Links are not resolved: the
    other machines of the run may have other ones.
    """
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":  # of the root directory, '..' is the root itself
            parts = parts[:-1]
        else:
            parts.append(part)
    # '' except on Windows: 'C:', or '//server/share'.
    drive = path.drive.replace("\\", "/")
    return "/".join([drive, *parts] if drive else parts)


def is_local_path(url: str) -> bool:
    """Whether the URL of a store is a directory of a file system, rather than a bucket."""
    return url.startswith(("/", "file:")) or _is_windows_path(url)


def _is_windows_path(text: str) -> bool:
    return sys.platform == "win32" and _WINDOWS_ROOT.match(text) is not None


def _parse_file_url(text: str) -> RootUrl:
    address = urlsplit(text)
    if address.netloc not in ("", "localhost") or not address.path.startswith("/"):
        raise ConfigError(
            "a file:// URL must contain an absolute path and no host name.",
            do="Write file:///absolute/path, or the plain path.",
        )
    _reject_unknown_options("file", _parse_query(address.query))
    path = unquote(address.path)
    # 'file:///C:/runs' has the path '/C:/runs'.
    return _parse_local_path(path[1:] if _is_windows_path(path[1:]) else path)


def _parse_bucket_url(scheme: str, text: str) -> RootUrl:
    address = urlsplit(text)
    # Before every other check: their messages could repeat the credentials.
    if "@" in address.netloc:
        raise _credentials_in_url_error()
    if not address.netloc:
        raise ConfigError(
            f"the {scheme}:// URL has no bucket.", do=f"Write {scheme}://bucket/folder."
        )
    if address.fragment:
        raise ConfigError(f"the {scheme}:// URL contains '#'.", do="Write '#' in a name as %23.")
    options = _parse_query(address.query)
    _reject_unknown_options(scheme, options)
    prefix = unquote(address.path).strip("/")
    return RootUrl(
        scheme,
        bucket=address.netloc,
        prefix=validate_key(prefix) if prefix else "",
        endpoint=_parse_endpoint(options),
        region=options.get("region", ""),
        account=options.get("account_name", ""),
    )


def is_same_root(url: str, other: str) -> bool:
    """Whether two store URLs name one directory: regions, endpoints and links are ignored."""
    return _location(url) == _location(other)


def _location(url: str) -> tuple[str, ...]:
    if url.startswith("/") or _is_windows_path(url):
        return (os.path.realpath(url),)
    try:
        root = RootUrl.parse(url)
    except ConfigError:  # of a file system that the user passed
        return (url,)
    return (root.scheme, root.bucket, root.prefix)


def _parse_query(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))


def _reject_unknown_options(scheme: str, options: Mapping[str, str]) -> None:
    known = _OPTIONS[scheme]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{scheme}:// URLs do not have an option {name!r}.",
                do=f"{did_you_mean(name, known)} Pass credentials in the environment."
                if known
                else "Write the address without '?'.",
            )


def _parse_endpoint(options: Mapping[str, str]) -> str:
    text = options.get("endpoint_url") or options.get("endpoint_override") or ""
    if not text:
        return ""
    url = text if "://" in text else f"{options.get('scheme') or 'https'}://{text}"
    address = urlsplit(url)
    if "@" in address.netloc:
        raise _credentials_in_url_error()
    if address.scheme not in ("http", "https") or not address.netloc:
        option = "endpoint_url" if options.get("endpoint_url") else "endpoint_override"
        problem = "names no server" if not address.netloc else f"has the scheme {address.scheme!r}"
        raise ConfigError(
            f"its option {option} is not an http or https URL: it {problem}.",
            do="Write endpoint_url=http://host:port, or endpoint_override=host:port&scheme=http.",
        )
    return url.rstrip("/")


def _credentials_in_url_error() -> ConfigError:
    return ConfigError(
        "it contains '@' before the path, as in credentials. The URL is written to the run's "
        "storage and logs, where others can read it.",
        do="Remove the part before '@'. Pass credentials in the environment, for example as "
        "AWS_ACCESS_KEY_ID.",
    )


# --- Storage credentials --------------------------------------------------------------------------


StorageCredentials = Mapping[str, str]
"""Options of the obstore client, such as `access_key_id`."""


def credentials_from_environment(root: RootUrl) -> StorageCredentials:
    """Return the credentials that `fit()` passed to this machine for the bucket of `root`.

    Read from SPOTFIT_STORAGE_KEYS. Empty if there are none; then obstore uses those that it finds
    on the machine. Raises `ConfigError` if the variable is not valid JSON.
    """
    return _parse_credentials(env.read(env.STORAGE_KEYS)).get(_bucket_id(root), {})


def format_credentials(root: RootUrl, credentials: StorageCredentials) -> str:
    """Return the value of SPOTFIT_STORAGE_KEYS for machines that access the bucket of `root`.

    It is JSON with the credentials in plain text, hence a secret; '' if `credentials` is empty.
    """
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
            f"The environment variable {env.STORAGE_KEYS.name} is not a JSON object of credentials "
            "by bucket.",
            do="Unset the variable: fit() sets it on the machines of the run.",
        ) from None  # the cause's text would show secrets
