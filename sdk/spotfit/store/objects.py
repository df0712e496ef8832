"""Buckets of S3, GCS and Azure and of compatible servers, accessed with obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spotfit.core.errors import (
    AlreadyExistsError,
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store import clients
from spotfit.store.api import (
    ALREADY_EXISTS_REMEDY,
    NOT_FOUND_REMEDY,
    PERMISSION_REMEDY,
    TRANSIENT_REMEDY,
    ObjectInfo,
    Store,
    changed_error,
)
from spotfit.store.local import atomic_write
from spotfit.store.retry import RetryPolicy, call_with_denials_repeated, call_with_retries
from spotfit.store.url import RootUrl, StorageCredentials, validate_key

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

    from spotfit.store.clients import ObstoreClient

ResultT = TypeVar("ResultT")

# AWS recommends parts of 8 to 16 MiB. Eight connections saturate the network of most nodes; a
# single one to S3 provides about 90 MB/s.
PART_BYTES = 8 * 2**20
"""Larger objects are transferred in parts of this size."""
PART_CONCURRENCY = 8
_MAX_PARTS = 9_000  # S3 allows 10,000
_TRANSFER_TIMEOUT_S = 600.0  # for gigabytes over a slow link, and outages in between
# Up to this size one request within the short timeout of calls is enough, even over a slow link.
_SINGLE_REQUEST_BYTES = 2**20


class ObjectStore:
    """Objects of one bucket (S3, GCS, Azure) below one prefix.

    Uses the explicit `credentials`, or without them those of this machine. It holds no connection,
    so that it can be pickled and used after a fork. Every method except `create` retries temporary
    failures within `retry_policy`; its total timeout is at least 600 s for uploads in parts and for
    `get_memoryview`.
    """

    def __init__(
        self,
        root: RootUrl,
        retry_policy: RetryPolicy | None = None,
        *,
        credentials: StorageCredentials | None = None,
    ) -> None:
        self._root = root
        self._retry_policy = retry_policy or RetryPolicy()
        self._credential_pairs = tuple(sorted((credentials or {}).items()))

    @property
    def url(self) -> str:
        """The address without credentials, such as `"s3://bucket/folder?region=eu-west-1"`."""
        return str(self._root)

    def get(self, key: str) -> bytes:
        """Return the object; each attempt is one request with a timeout of 10 s.

        See `Store.get`.
        """
        return self._call_with_retries(key, lambda client: client.get(key).bytes().to_bytes())

    def written_at_ms(self, key: str) -> int:
        """Return when the object was written, by the bucket's clock in ms since 1970."""
        meta = self._call_with_retries(key, lambda client: client.head(key))
        return round(meta["last_modified"].timestamp() * 1000)

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> memoryview:
        """Return a part of the object in a buffer of obstore; see `Store.get_range`.

        One request per attempt; an empty range also sends one. Up to 8 MiB each attempt has a
        timeout of 10 s, above of 5 minutes.
        """
        # Servers reject an empty range, so at least one byte is requested.
        options: GetOptions = {"range": (start, start + max(length, 1))}
        if version:
            options["if_match"] = version
        try:
            body = self._call_with_retries(
                key,
                lambda client: memoryview(client.get(key, options=options).bytes()),
                for_transfers=length > PART_BYTES,
            )
            return body[:length]
        except _RangeNotSatisfiableError:
            return memoryview(b"")

    def head(self, key: str) -> ObjectInfo:
        """Return size and ETag of the object in one request; see `Store.head`."""
        meta = self._call_with_retries(key, lambda client: client.head(key))
        return _to_object_info(meta)._replace(key=key)

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return the object in a buffer of obstore, without a copy; `scratch` is not used."""
        # obstore returns a buffer of its own; copying it to `scratch` would gain nothing.
        return self._call_with_retries(
            key, lambda client: memoryview(client.get(key).bytes()), for_transfers=True
        )

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write or replace the object: in one request up to 1 MiB, above in concurrent parts."""
        if len(body) <= _SINGLE_REQUEST_BYTES:
            self._call_with_retries(key, lambda client: client.put(key, body))
        else:
            self._put_multipart(key, body, len(body))

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, in a single attempt; see `Store.create`.

        One request with a timeout of 10 s, or of 5 minutes above 1 MiB. Only a denied request (401,
        403), which has not been executed, is repeated.
        """

        # Once: a second attempt could fail because of the object that the first one wrote.
        def create_once() -> None:
            self._call_once(
                key,
                lambda client: client.put(key, body, mode="create"),
                for_transfers=len(body) > _SINGLE_REQUEST_BYTES,
                is_create=True,
            )

        call_with_denials_repeated(create_once, self._retry_policy)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects of a folder, sorted by key, one page per request; see `Store.list`.

        A failed request is repeated, and the listing continues after its last key.
        """
        pages = _ResumableListing(prefix=validate_key(prefix) if prefix else "", after=after)
        while page := self._call_with_retries(None, pages.next_page):
            yield from page

    def delete(self, key: str) -> None:
        """Delete the object in one request. Does nothing if it does not exist."""
        with suppress(NotFoundError):
            self._call_with_retries(key, lambda client: client.delete(key))

    def put_file(self, key: str, path: Path) -> None:
        """Upload a local file as the object: in one request up to 1 MiB, above in concurrent parts.

        Raises `OSError` if the file cannot be read.
        """
        size_bytes = path.stat().st_size
        if size_bytes <= _SINGLE_REQUEST_BYTES:
            self.put(key, path.read_bytes())
            return
        # An unreadable file raises OSError here; obstore would report an error of the storage.
        with path.open("rb"):
            self._put_multipart(key, path, size_bytes)

    def get_file(self, key: str, path: Path) -> None:
        """Download the object to a local file, in concurrent parts of 8 MiB; see `Store.get_file`.

        Parts are compared by the ETag: if the object is replaced meanwhile, a `StoreError` is
        raised.
        """

        def get_first(client: ObstoreClient) -> tuple[bytes, int, str | None]:
            response = client.get(key, options={"range": (0, PART_BYTES)})
            return response.bytes().to_bytes(), response.meta["size"], response.meta["e_tag"]

        # One request returns the first part, the size of the object and its ETag, so that a small
        # object needs no further request.
        try:
            first, size_bytes, etag = self._call_with_retries(key, get_first)
        except _RangeNotSatisfiableError:  # the object is empty
            first, size_bytes, etag = b"", 0, None
        with atomic_write(path) as part, part.open("xb") as file:
            file.write(first)
            file.flush()
            if size_bytes > len(first):
                starts = range(len(first), size_bytes, PART_BYTES)
                self._download_parts(part, key, starts=starts, etag=etag)

    def subtree(self, prefix: str) -> Store:
        """Return the store of the folder `prefix`, with the same retry policy and credentials."""
        return ObjectStore(
            self._root.join(prefix), self._retry_policy, credentials=dict(self._credential_pairs)
        )

    @property
    def credentials(self) -> StorageCredentials:
        """A copy of the explicit credentials, as options of obstore; empty if it has none.

        For example `{"access_key_id": ..., "secret_access_key": ...}`. They are secret. Without
        any, those of the machine are used.
        """
        return dict(self._credential_pairs)

    def _put_multipart(self, key: str, body: bytes | memoryview | Path, size_bytes: int) -> None:
        # Objects over 70 GiB need larger parts, because of the maximum number of parts.
        part_bytes = max(PART_BYTES, size_bytes // _MAX_PARTS)
        self._call_with_retries(
            key,
            lambda client: client.put(
                key, body, chunk_size=part_bytes, max_concurrency=PART_CONCURRENCY
            ),
            for_transfers=True,
        )

    def _download_parts(self, path: Path, key: str, starts: range, etag: str | None) -> None:
        """Write the parts at these offsets to the file."""

        def fetch(start: int) -> None:
            options: GetOptions = {"range": (start, min(start + starts.step, starts.stop))}
            if etag:  # parts of an object that is replaced meanwhile must not be mixed
                options["if_match"] = etag
            body = self._call_with_retries(
                key, lambda client: client.get(key, options=options).bytes(), for_transfers=True
            )
            # Its own descriptor, with its own position: Windows has no pwrite().
            with path.open("r+b") as file:
                file.seek(start)
                file.write(memoryview(body))

        with ThreadPoolExecutor(PART_CONCURRENCY, "spotfit-get") as pool:
            for _ in pool.map(fetch, starts):
                pass

    def _call_with_retries(
        self,
        key: str | None,
        call: Callable[[ObstoreClient], ResultT],
        *,
        for_transfers: bool = False,
    ) -> ResultT:
        policy = self._retry_policy
        if for_transfers:
            timeout_s = max(_TRANSFER_TIMEOUT_S, policy.total_timeout_s)
            policy = replace(policy, total_timeout_s=timeout_s)
        return call_with_retries(
            lambda: self._call_once(key, call, for_transfers=for_transfers), policy
        )

    def _call_once(
        self,
        key: str | None,
        call: Callable[[ObstoreClient], ResultT],
        *,
        for_transfers: bool = False,
        is_create: bool = False,
    ) -> ResultT:
        name = "object" if key is None else validate_key(key)
        try:
            client = clients.client_for(
                self._root,
                self._credential_pairs,
                for_transfers=for_transfers,
                is_retried=not is_create,
            )
            return call(client)
        except clients.client_error_types() as error:
            # Not chained: obstore's text may contain signed URLs.
            raise _to_store_error(error, f"{name} in {self.url}", is_create=is_create) from None


class _ResumableListing:
    """A listing that continues after its last key when a request has failed."""

    def __init__(self, *, prefix: str, after: str) -> None:
        self._prefix = prefix
        self._after = after
        self._chunks: Iterator[Sequence[ObjectMeta]] | None = None

    def next_page(self, client: ObstoreClient) -> list[ObjectInfo]:
        """Request and return the next page of objects, sorted by key; empty at the end.

        If it raises, the next call, which may use another client, continues after the last returned
        key.
        """
        if self._chunks is None:
            self._chunks = iter(client.list(self._prefix or None, offset=self._after or None))
        # Azurite ignores the offset of a listing, so earlier keys are filtered here. Buckets sort
        # keys by their UTF-8 bytes.
        after = self._after.encode()
        try:
            for chunk in self._chunks:
                infos = map(_to_object_info, chunk)
                if page := [info for info in infos if info.key.encode() > after]:
                    self._after = page[-1].key  # a new listing starts here after an error
                    return page
        except BaseException:
            self._chunks = None
            raise
        return []


def _to_object_info(meta: ObjectMeta) -> ObjectInfo:
    # Azure's listings contain ETags without the quotes that conditions require.
    etag = meta["e_tag"] or ""
    version = f'"{etag}"' if etag and '"' not in etag else etag
    return ObjectInfo(meta["path"], meta["size"], version)


# ── translation of obstore's errors ──────────────────────────────────────────────────────────────


class _RangeNotSatisfiableError(StoreError):
    """The range starts at or after the end of the object."""


class _MissingCredentialsError(StorePermissionError, TransientStoreError):
    """No credentials were found.

    Also transient: the metadata service of a machine with a role may be overloaded for a moment.
    """


_BLOB_EXISTS = re.compile(r"<Code>BlobAlreadyExists</Code>")  # Azure's code of an existing object
_STATUS = re.compile(r"status code: (\d{3})")
_SERVER_ERROR = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_URL_QUERY = re.compile(r"\?\S+")
_MISSING_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_MISSING_CREDENTIALS = re.compile(
    r"//169\.254\.|metadata\.google|(missing|no|find|load|provide) credential", re.IGNORECASE
)
_RANGE_NOT_SATISFIABLE = re.compile(
    r"Range Not Satisfiable|InvalidRange|Wanted range starting at", re.IGNORECASE
)
_WRONG_REGION = re.compile(r"redirect without LOCATION|AuthorizationHeaderMalformed")
_CONNECTION_ERROR = re.compile(
    r"HTTP error|error sending request|timed? ?out|connection", re.IGNORECASE
)
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
_TRANSIENT_CODES = re.compile(
    r"RequestTimeout|ExpiredToken|SlowDown|InternalError|ServerBusy|Throttl"
)
# 401 and 403 are not transient: `store.retry` repeats them a few times only.
_FORBIDDEN_STATUSES = frozenset({401, 403})


def _to_store_error(error: Exception, what: str, *, is_create: bool) -> StoreError | ConfigError:
    """Return spotfit's error for an error of obstore; `what` names the object.

    obstore has types for few errors, so most are recognized by their text.
    """
    # What follows is a dump of the request, which contains words that the patterns search for.
    text = str(error).partition("Debug source")[0]
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    # A query may contain a signature, with which anyone could repeat the request.
    server_error = _SERVER_ERROR.search(text)
    message = (
        f"{server_error[1]}: {server_error[2]}"
        if server_error
        else _URL_QUERY.sub("", " ".join(text.split()))[:300]
    )
    # S3's 409 means that another request was in progress and nothing may have been written:
    # "On a 409 failure, retry the upload" (PutObject, If-None-Match). Only Azure's says more.
    is_taken = status != 409 or _BLOB_EXISTS.search(text)
    if is_create and is_taken and (status == 412 or type(error).__name__ == "AlreadyExistsError"):
        return AlreadyExistsError(f"{what} already exists.", do=ALREADY_EXISTS_REMEDY)
    if status == 412:
        return changed_error(what)
    if _MISSING_BUCKET.search(text):
        return BucketNotFoundError(
            f"The bucket of {what} does not exist.",
            do="Create the bucket, or correct its name in storage_path.",
        )
    # After the bucket: a missing bucket is answered with 404 as well.
    if status == 404 or isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what} does not exist.", do=NOT_FOUND_REMEDY)
    if _RANGE_NOT_SATISFIABLE.search(text):
        return _RangeNotSatisfiableError(f"The range is beyond the end of {what}.")
    if _WRONG_REGION.search(text):
        return StoreError(
            f"The bucket of {what} is in another region than the one configured: {message}",
            do="Set the environment variable AWS_REGION, or add ?region=… to storage_path.",
        )
    return _to_refusal_error(text, status, what=what, message=message)


def _to_refusal_error(
    text: str, status: int, *, what: str, message: str
) -> StoreError | ConfigError:
    if _MISSING_CREDENTIALS.search(text):
        return _MissingCredentialsError(
            f"No credentials were found for {what}: {message}",
            do="Set them in the environment, for example AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; those of ~/.aws are used if boto3 is installed.",
        )
    # Before the status: S3 answers an expired token, which the driver renews, with 400 or 403.
    if _TRANSIENT_CODES.search(message):
        return TransientStoreError(
            f"A request to the storage for {what} failed: {message}",
            do=TRANSIENT_REMEDY,
        )
    if status in _FORBIDDEN_STATUSES:
        return StorePermissionError(
            f"The credentials do not permit this operation on {what}: {message}",
            do=PERMISSION_REMEDY,
        )
    if (
        status in _TRANSIENT_STATUSES
        or status >= 500
        or (not status and _CONNECTION_ERROR.search(text))
    ):
        return TransientStoreError(
            f"A request to the storage for {what} failed: {message}",
            do=TRANSIENT_REMEDY,
        )
    return StoreError(
        f"The storage rejected a request for {what}: {message}",
        do="Check the bucket's name, and its region and endpoint in storage_path and the "
        "environment.",
    )
