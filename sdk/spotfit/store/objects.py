"""A bucket of S3, Google or Azure, or of what speaks like them, over obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store import driver
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.budget import Budget
from spotfit.store.credentials import Keys
from spotfit.store.parts import appearing
from spotfit.store.retry import persistently
from spotfit.store.url import RootUrl, checked_key

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

    from spotfit.store.clients import Client

Answer = TypeVar("Answer")

PART_BYTES = 8 * 2**20
"""What is bigger travels in parts of this size, `PARTS_AT_ONCE` at a time."""

PARTS_AT_ONCE = 8
_MOST_PARTS = 9_000  # S3 allows 10,000
_FILES_WITHIN_S = 600.0
_SMALL_BYTES = 2**20
"""What is no bigger travels quickly, or not at all."""


class ObjectStore:
    """Objects of one bucket below one prefix. Holds no connection: it may be pickled and forked.

    `keys` are credentials that somebody gave; else they are those of this machine.
    """

    def __init__(
        self, root: RootUrl, budget: Budget | None = None, *, keys: Keys | None = None
    ) -> None:
        self._root = root
        self._budget = budget or Budget()
        self._keys = tuple(sorted((keys or {}).items()))

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str) -> bytes:
        return self._repeatedly(key, lambda client: client.get(key).bytes().to_bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        # A range of nothing is refused everywhere, so one byte is asked for at least.
        options: GetOptions = {"range": (start, start + max(length, 1))}
        try:
            body = self._repeatedly(
                key, lambda client: client.get(key, options=options).bytes().to_bytes()
            )
            return body[:length]
        except _BeyondTheEndError:
            return b""

    def view(self, key: str, spare: memoryview) -> memoryview:
        def ask(client: Client) -> memoryview:
            return memoryview(client.get(key).bytes())

        return persistently(lambda: self._once(key, ask, insists=True), self._for_files)

    def put(self, key: str, body: bytes | memoryview) -> None:
        if len(body) <= _SMALL_BYTES:
            self._repeatedly(key, lambda client: client.put(key, body))
        else:
            self._put_big(key, body, len(body))

    def create(self, key: str, body: bytes) -> None:
        self._once(key, lambda client: client.put(key, body, mode="create"), creating=True)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        pages = _Pages(prefix=checked_key(prefix) if prefix else "", after=after)
        while page := self._repeatedly(None, pages.next):
            yield from page

    def delete(self, key: str) -> None:
        try:
            self._repeatedly(key, lambda client: client.delete(key))
        except NotFoundError:
            return

    def put_file(self, key: str, path: Path) -> None:
        size_bytes = path.stat().st_size
        if size_bytes <= _SMALL_BYTES:
            self.put(key, path.read_bytes())
            return
        with path.open("rb"):  # a file that cannot be read is the caller's trouble, told as OSError
            self._put_big(key, path, size_bytes)

    def get_file(self, key: str, path: Path) -> None:
        first, size_bytes, version = self._first_part(key)
        with appearing(path) as part, part.open("xb") as file:
            file.write(first)
            file.flush()
            if size_bytes > len(first):
                self._fill(file.fileno(), key, range(len(first), size_bytes, PART_BYTES), version)

    def under(self, prefix: str) -> Store:
        return ObjectStore(self._root.below(prefix), self._budget, keys=dict(self._keys))

    @property
    def keys(self) -> Keys:
        """The credentials somebody gave."""
        return dict(self._keys)

    @property
    def _for_files(self) -> Budget:
        """They take their time."""
        return replace(self._budget, within_s=max(_FILES_WITHIN_S, self._budget.within_s))

    def _put_big(self, key: str, body: bytes | memoryview | Path, size_bytes: int) -> None:
        """In parts where it is more than one; each is given time, for some wires are slow."""
        part_bytes = max(PART_BYTES, size_bytes // _MOST_PARTS)
        persistently(
            lambda: self._once(
                key,
                lambda client: client.put(
                    key, body, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE
                ),
                insists=True,
            ),
            self._for_files,
        )

    def _first_part(self, key: str) -> tuple[bytes, int, str | None]:
        def ask(client: Client) -> tuple[bytes, int, str | None]:
            answer = client.get(key, options={"range": (0, PART_BYTES)})
            return answer.bytes().to_bytes(), answer.meta["size"], answer.meta["e_tag"]

        try:
            return self._repeatedly(key, ask)
        except _BeyondTheEndError:  # nothing can be cut out of an empty object
            return b"", 0, None

    def _fill(self, file: int, key: str, starts: range, version: str | None) -> None:
        """Fetch the other parts, of that same version, each to its place in the file."""

        def fetch(start: int) -> None:
            options: GetOptions = {"range": (start, min(start + starts.step, starts.stop))}
            if version:
                options["if_match"] = version
            body = self._once(
                key, lambda client: client.get(key, options=options).bytes(), insists=True
            )
            _write_all(file, memoryview(body), start)

        with ThreadPoolExecutor(PARTS_AT_ONCE, "spotfit-get") as pool:
            for _ in pool.map(fetch, starts):
                pass

    def _repeatedly(self, key: str | None, call: Callable[[Client], Answer]) -> Answer:
        return persistently(lambda: self._once(key, call), self._budget)

    def _once(
        self,
        key: str | None,
        call: Callable[[Client], Answer],
        *,
        insists: bool = False,
        creating: bool = False,
    ) -> Answer:
        what = "object" if key is None else checked_key(key)
        try:
            return call(driver.client(self._root, self._keys, insists=insists))
        except driver.failures() as error:
            # Not chained: the driver's text may hold signed addresses, and ours says the rest.
            raise _ours(error, f"{what} in {self.url}", creating=creating) from None


class _Pages:
    """A listing that goes on from its last key after a failure."""

    def __init__(self, *, prefix: str, after: str) -> None:
        self._prefix = prefix
        self._after = after
        self._chunks: Iterator[Sequence[ObjectMeta]] | None = None

    def next(self, client: Client) -> list[ObjectInfo]:
        """The next page; empty at the end."""
        if self._chunks is None:
            self._chunks = iter(client.list(self._prefix or None, offset=self._after or None))
        try:
            page = self._next_of_them(self._chunks)
        except BaseException:
            self._chunks = None
            raise
        if page:
            self._after = page[-1].key
        return page

    def _next_of_them(self, chunks: Iterator[Sequence[ObjectMeta]]) -> list[ObjectInfo]:
        """Azurite does not heed where a listing is to begin: what is before that is left out."""
        begin = self._after.encode()
        for chunk in chunks:
            page = [ObjectInfo(found["path"], found["size"]) for found in chunk]
            rest = [found for found in page if found.key.encode() > begin]
            if rest:
                return rest
        return []


def _write_all(file: int, body: memoryview, at: int) -> None:
    while body:
        written = os.pwrite(file, body, at)
        body, at = body[written:], at + written


# ── the driver's errors in our words ─────────────────────────────────────────────────────────────


class _BeyondTheEndError(StoreError):
    """The range begins at or after the end of the object."""


class _NoCredentialsError(StorePermissionError, TransientStoreError):
    """Nobody gave credentials: worth another try on a machine with a role, hopeless elsewhere."""


_STATUS = re.compile(r"status code: (\d{3})")
_TOLD_BY_SERVER = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_MAY_BE_SIGNED = re.compile(r"\?\S+")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(
    r"//169\.254\.|metadata\.google|(missing|no|find|load|provide) credential", re.IGNORECASE
)
_BEYOND_THE_END = re.compile(
    r"Range Not Satisfiable|InvalidRange|Wanted range starting at", re.IGNORECASE
)
_WRONG_REGION = re.compile(r"redirect without LOCATION|AuthorizationHeaderMalformed")
_NO_ANSWER = re.compile(r"HTTP error|error sending request|timed? ?out|connection", re.IGNORECASE)
_PASSING = frozenset({408, 409, 412, 425, 429})
_PASSING_CODES = re.compile(
    r"RequestTimeout|ExpiredToken|SlowDown|InternalError|ServerBusy|Throttl"
)
_FORBIDDEN = frozenset({401, 403})


def _ours(error: Exception, what: str, *, creating: bool) -> StoreError | ConfigError:
    """What happened, as one of our errors; text is read only where obstore has no type for it."""
    text = str(error).partition("Debug source")[0]
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    told = _told(text)
    if creating and (status in (409, 412) or type(error).__name__ == "AlreadyExistsError"):
        return AlreadyExistsError(f"{what} is there already.")
    if _NO_BUCKET.search(text):
        return StoreError(f"There is no such bucket: {what}.", do="Create it, or correct the name.")
    if status == 404 or isinstance(error, FileNotFoundError):
        return NotFoundError(f"There is no {what}.")
    if _BEYOND_THE_END.search(text):
        return _BeyondTheEndError(f"That range lies beyond the end of {what}.")
    if _WRONG_REGION.search(text):
        return StoreError(
            f"The bucket lies in another region than the one asked for {what}: {told}",
            do="Set AWS_REGION, or add ?region=… to the address.",
        )
    return _refused(text, status, what, told)


def _refused(text: str, status: int, what: str, told: str) -> StoreError | ConfigError:
    if _NO_CREDENTIALS.search(text):
        return _NoCredentialsError(
            f"There are no credentials for {what}: {told}",
            do="Put them into the environment, for instance AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; those of ~/.aws are used where boto3 is installed.",
        )
    if _PASSING_CODES.search(told):
        return TransientStoreError(f"The storage failed at {what}: {told}", do="Try again.")
    if status in _FORBIDDEN:
        return StorePermissionError(
            f"These credentials may not do that with {what}: {told}",
            do="Use others, or have these allowed to read, write, list and delete there.",
        )
    if status in _PASSING or status >= 500 or (not status and _NO_ANSWER.search(text)):
        return TransientStoreError(f"The storage failed at {what}: {told}", do="Try again.")
    return StoreError(f"The storage refused {what}: {told}")


def _told(text: str) -> str:
    """The driver's words in one line, without the query of any address: it may hold a signature."""
    if found := _TOLD_BY_SERVER.search(text):
        return f"{found[1]}: {found[2]}"
    return _MAY_BE_SIGNED.sub("", " ".join(text.split()))[:300]
