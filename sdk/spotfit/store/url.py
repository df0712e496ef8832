"""Addresses at the door: the text of a root becomes a `RootUrl`, once; keys are checked here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean

PART_NAME = ".spotfit-part-"
"""Files that begin so are half written; they are no objects, and no key may look like one."""

_SEGMENT = rf"(?!\.{{1,2}}(?:/|$))(?!{re.escape(PART_NAME)})[^/\x00-\x1f\x7f\ud800-\udfff]+"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_ALIASES = {"gcs": "gs", "s3a": "s3"}
_ENDPOINT_OPTIONS = frozenset({"endpoint_override", "endpoint_url", "scheme"})
_OPTIONS: Mapping[str, frozenset[str]] = {
    "s3": _ENDPOINT_OPTIONS | {"region"},
    "gs": _ENDPOINT_OPTIONS,
    "az": _ENDPOINT_OPTIONS | {"account_name"},
    "file": frozenset(),
    "memory": frozenset(),
}
_PLACES = tuple(f"{scheme}://" for scheme in _OPTIONS)


def checked_key(key: str) -> str:
    """`key`, if it names one object below a root; otherwise a `ConfigError`."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{key!r} cannot be the key of an object: keys are relative, their parts are separated "
            "by single '/', and no part is '.' or '..', holds control characters, or begins with "
            f"{PART_NAME!r}.",
            do="Rename the file or folder it stands for.",
        )
    return key


@dataclass(frozen=True, slots=True)
class RootUrl:
    """Where a root lies. It holds no secret: credentials come from the environment of each machine.

    `str(root)` is for people, and parses back to an equal `RootUrl`; for a local directory it is
    the plain path. `endpoint` is the whole URL of a server other than the cloud's own.
    """

    scheme: str
    bucket: str = ""
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    account: str = ""

    @classmethod
    def parse(cls, text: str | Path) -> RootUrl:
        """The root that `text` means: `s3://`, `gs://`, `az://`, `file://`, `memory://`, or a path.

        Buckets take the options of pyarrow's URIs, `?endpoint_override=host:port&scheme=http` and
        `&region=…`, or `?endpoint_url=http://host:port`. Raises `ConfigError`, which never shows
        what might be a secret.
        """
        if isinstance(text, Path):
            return _local(str(text))
        named = _SCHEME.match(text)
        if named is None:
            return _local(text)
        scheme = _known_scheme(named[1], has_slashes=bool(named[2]))
        if scheme == "file":
            return _local_url(text)
        return _bucket(scheme, text)

    @property
    def path(self) -> str:
        """The address without its scheme: 'bucket/folder', or the absolute path of a directory."""
        if self.scheme == "file":
            return f"/{self.prefix}"
        return f"{self.bucket}/{self.prefix}".rstrip("/")

    def below(self, prefix: str) -> RootUrl:
        """The root `prefix` deeper."""
        checked_key(prefix)
        return replace(self, prefix=f"{self.prefix}/{prefix}" if self.prefix else prefix)

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.path
        address = f"{self.scheme}://{self.bucket}/{quote(self.prefix, safe=_SHOWN_AS_IS)}".rstrip(
            "/"
        )
        options = self._options()
        return f"{address}?{urlencode(options, safe=':/[]')}" if options else address

    def _options(self) -> dict[str, str]:
        endpoint = urlsplit(self.endpoint)
        said = {
            "endpoint_override": endpoint.netloc + endpoint.path,
            "scheme": endpoint.scheme,
            "region": self.region,
            "account_name": self.account,
        }
        return {name: value for name, value in said.items() if value}


# Everything but what would end the path or be taken for an escape: people read these.
_SHOWN_AS_IS = " !\"$&'()*+,-./:;<=>@[\\]^_`{|}~"


def _known_scheme(word: str, *, has_slashes: bool) -> str:
    scheme = _ALIASES.get(word.lower(), word.lower())
    if scheme not in _OPTIONS:
        raise ConfigError(
            f"{word}: is no kind of storage.",
            do=f"{did_you_mean(f'{scheme}://', _PLACES)} A plain path means a local directory; "
            "write './' before one that holds a colon.",
        )
    if not has_slashes:
        raise ConfigError(f"After {word}: two slashes are missing.", do=f"Write {word}://…")
    return scheme


def _local(text: str) -> RootUrl:
    if not text.strip() or "\x00" in text:
        raise ConfigError(
            "An empty text, or one with a NUL in it, is no place to store a run.",
            do=f"Give a directory or one of: {', '.join(_PLACES)}.",
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text!r}: {error}", do="Write the whole path.") from error
    normal = (Path.cwd() / path).parts[1:]
    return RootUrl("file", prefix="/".join(_without_dots(normal)))


def _without_dots(parts: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if part == "..":
            kept = kept[:-1]
        else:
            kept.append(part)
    return kept


def _local_url(text: str) -> RootUrl:
    address = urlsplit(text)
    if address.netloc not in ("", "localhost") or not address.path.startswith("/"):
        raise ConfigError(
            "A file:// address names a path of this machine, from its root.",
            do="Write file:///absolute/path, or the plain path.",
        )
    _refuse_unknown("file", _query(address.query))
    return _local(unquote(address.path))


def _bucket(scheme: str, text: str) -> RootUrl:
    address = urlsplit(text)
    if "@" in address.netloc:
        raise _secret_shown()
    if not address.netloc or address.fragment:
        raise ConfigError(
            f"The {scheme}:// address names no bucket, or holds a '#'.",
            do=f"Write {scheme}://bucket/folder; write a '#' within it as %23.",
        )
    options = _query(address.query)
    _refuse_unknown(scheme, options)
    prefix = unquote(address.path).strip("/")
    return RootUrl(
        scheme,
        bucket=address.netloc,
        prefix=checked_key(prefix) if prefix else "",
        endpoint=_endpoint(options),
        region=options.get("region", ""),
        account=options.get("account_name", ""),
    )


def _query(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))


def _refuse_unknown(scheme: str, options: Mapping[str, str]) -> None:
    known = _OPTIONS[scheme]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{scheme}:// addresses know no option {name!r}.",
                do=f"{did_you_mean(name, known)} Credentials belong into the environment."
                if known
                else "Write the address without '?'.",
            )


def _endpoint(options: Mapping[str, str]) -> str:
    named = options.get("endpoint_url") or options.get("endpoint_override") or ""
    if not named:
        return ""
    whole = named if "://" in named else f"{options.get('scheme') or 'https'}://{named}"
    address = urlsplit(whole)
    if "@" in address.netloc:
        raise _secret_shown()
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(
            "The endpoint is not the address of a server.",
            do="Write endpoint_url=http://host:port, or endpoint_override=host:port&scheme=http.",
        )
    return whole.rstrip("/")


def _secret_shown() -> ConfigError:
    return ConfigError(
        "The storage address holds credentials, or an '@' before its path; it is written into "
        "the run and its logs, where everybody would read them.",
        do="Put them into the environment, such as AWS_ACCESS_KEY_ID.",
    )
