import pickle
from pathlib import Path

import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.objects import PART_BYTES, ObjectStore, _to_store_error
from spotfit.store.retry import RetryPolicy
from spotfit.store.url import RootUrl
from tests.unit.store.conftest import ScriptedBucket


@pytest.fixture
def store(bucket: ScriptedBucket) -> ObjectStore:
    return ObjectStore(RootUrl.parse(bucket.url), RetryPolicy(max_attempts=3, max_backoff_s=0.0))


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_idempotent_calls_are_retried(
    bucket: ScriptedBucket, store: ObjectStore, status: int
) -> None:
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: store.delete("a"),
    ):
        bucket.requests.clear()
        bucket.enqueue_responses(status, status)
        call()
        assert len(bucket.requests) == 3


def test_the_last_error_is_raised_when_the_budget_is_spent(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.enqueue_responses(*[503] * 9)
    with pytest.raises(TransientStoreError, match="Code: why"):
        store.get("a")
    assert len(bucket.requests) == 3


@pytest.mark.parametrize("size_bytes", [1, 12 * 2**20])
@pytest.mark.parametrize("status", [500, 503, 429])
def test_create_is_one_request_that_is_not_retried(
    bucket: ScriptedBucket, store: ObjectStore, status: int, size_bytes: int
) -> None:
    bucket.enqueue_responses(status)
    with pytest.raises(TransientStoreError):
        store.create("a", b"x" * size_bytes)
    assert bucket.requests == [("PUT", "/bucket/a")]


@pytest.mark.parametrize("status", [401, 403])
def test_a_create_that_was_denied_once_is_repeated(
    bucket: ScriptedBucket, store: ObjectStore, status: int
) -> None:
    """A denied request has not been executed, so that the second one finds no object of the first.

    New credentials are not known to all servers at once.
    """
    bucket.enqueue_responses(status)
    store.create("a", b"x")
    assert bucket.requests == [("PUT", "/bucket/a")] * 2


def test_a_create_after_a_denial_and_a_lost_response_is_not_repeated(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.enqueue_responses(403, 503)
    with pytest.raises(TransientStoreError):
        store.create("a", b"x")
    assert len(bucket.requests) == 2


@pytest.mark.parametrize(
    ("status", "code"), [(412, "PreconditionFailed"), (409, "BlobAlreadyExists")]
)
def test_a_lost_create_raises_already_exists(
    bucket: ScriptedBucket, store: ObjectStore, status: int, code: str
) -> None:
    bucket.enqueue_responses(status, code=code)
    with pytest.raises(AlreadyExistsError):
        store.create("a", b"x")
    assert len(bucket.requests) == 1


def test_an_object_that_was_replaced_during_a_read_is_not_read_again(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.enqueue_responses(412, code="PreconditionFailed")
    with pytest.raises(StoreError, match="was replaced while it was read"):
        store.get("a")
    assert len(bucket.requests) == 1


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_during_a_create_is_transient(
    bucket: ScriptedBucket, store: ObjectStore, code: str
) -> None:
    """S3 asks for a retry: the conflicting request need not have written the object."""
    bucket.enqueue_responses(409, code=code)
    with pytest.raises(TransientStoreError, match=code):
        store.create("a", b"x")
    store.create("a", b"x")
    assert bucket.objects == {"/bucket/a": b"x"}


@pytest.mark.parametrize(
    ("status", "code", "kind", "expected"),
    [
        (401, "Code", StorePermissionError, "do not permit"),
        (403, "AccessDenied", StorePermissionError, "AccessDenied: why"),
        (404, "NoSuchKey", NotFoundError, "a in .* does not exist"),
        (404, "NoSuchBucket", BucketNotFoundError, "The bucket of a .* does not exist"),
        (400, "AuthorizationHeaderMalformed", StoreError, "AWS_REGION"),
        (301, "PermanentRedirect", StoreError, "AWS_REGION"),
        (400, "Odd", StoreError, "rejected"),
    ],
)
def test_errors_of_the_server_are_translated(
    bucket: ScriptedBucket,
    store: ObjectStore,
    status: int,
    code: str,
    kind: type[StoreError],
    expected: str,
) -> None:
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
    ):
        bucket.enqueue_responses(*[status] * 3, code=code)
        with pytest.raises(StoreError, match=expected) as raised:
            call()
        assert type(raised.value) is kind
        bucket.responses.clear()


@pytest.mark.parametrize("code", ["RequestTimeout", "ExpiredToken", "SlowDown"])
def test_transient_error_codes_override_the_status(
    bucket: ScriptedBucket, store: ObjectStore, code: str
) -> None:
    bucket.enqueue_responses(400, code=code)
    store.put("a", b"x")
    assert len(bucket.requests) == 2
    bucket.enqueue_responses(400, code=code)
    with pytest.raises(TransientStoreError, match=code):
        store.create("b", b"x")


def test_a_forbidden_listing_raises_permission_error(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.enqueue_responses(403, 403, 403)
    with pytest.raises(StorePermissionError):
        list(store.list())


def test_a_denied_part_of_a_download_is_requested_again(
    bucket: ScriptedBucket, store: ObjectStore, tmp_path: Path
) -> None:
    bucket.objects["/bucket/a"] = bytes(PART_BYTES) + b"last part"
    file = tmp_path / "file"
    file.touch()
    bucket.enqueue_responses(403)
    store._download_parts(file, "a", range(PART_BYTES, PART_BYTES + 9, PART_BYTES), "")
    assert file.read_bytes() == bytes(PART_BYTES) + b"last part"
    store.get_file("a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_machine_without_a_role_reports_missing_credentials() -> None:
    refused = Exception(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - "
        "Server returned non-2xx status code: 403 Forbidden"
    )
    error = _to_store_error(refused, "a", is_create=True)
    assert isinstance(error, StorePermissionError)
    assert isinstance(error, TransientStoreError)
    assert "No credentials" in str(error)


@pytest.mark.usefixtures("bucket")
def test_an_unreachable_server_is_a_transient_error() -> None:
    unreachable = RootUrl.parse("s3://bucket?endpoint_url=http://127.0.0.1:9")
    store = ObjectStore(unreachable, RetryPolicy(max_attempts=1))
    with pytest.raises(TransientStoreError):
        store.create("a", b"")


def test_errors_contain_no_query_of_a_url(bucket: ScriptedBucket, store: ObjectStore) -> None:
    bucket.enqueue_responses(400)
    with pytest.raises(StoreError) as raised:
        list(store.list())
    assert "list-type" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_listing_continues_after_a_failure(bucket: ScriptedBucket, store: ObjectStore) -> None:
    page = "<ListBucketResult><IsTruncated>{more}</IsTruncated>{next}{keys}</ListBucketResult>"
    bucket.objects["/bucket"] = b""
    keys = "".join(
        f"<Contents><Key>k{n:04}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for n in range(1000)
    )
    first = page.format(
        more="true", next="<NextContinuationToken>t</NextContinuationToken>", keys=keys
    )
    bucket.objects["/bucket"] = first.encode()
    listing = store.list()
    assert next(listing).key == "k0000"
    bucket.objects["/bucket"] = page.format(more="false", next="", keys="").encode()
    bucket.enqueue_responses(503)
    assert [found.key for found in listing] == [f"k{n:04}" for n in range(1, 1000)]


@pytest.mark.parametrize(
    ("after", "left"), [("k0", ["k1", "k2"]), ("k11", ["k2"]), ("k2", []), ("z", [])]
)
def test_a_server_that_ignores_the_offset_of_a_listing_is_supported(
    bucket: ScriptedBucket, store: ObjectStore, after: str, left: list[str]
) -> None:
    """Azurite ignores it."""
    keys = "".join(
        f"<Contents><Key>k{n}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for n in range(3)
    )
    whole = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
    bucket.objects["/bucket"] = whole.encode()
    assert [found.key for found in store.list(after=after)] == left


@pytest.mark.parametrize(
    "text",
    [
        "Error performing GET - Server returned non-2xx status code: 416 Range Not Satisfiable",
        "Generic MicrosoftAzure error: Wanted range starting at 9, but object was only 9 bytes",
    ],
)
def test_a_range_beyond_the_end_is_recognized(text: str) -> None:
    wrong = _to_store_error(RuntimeError(text), "a", is_create=False)
    assert "beyond the end" in wrong.message


def test_an_invalid_key_is_rejected_before_any_request(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    for call in (store.get, store.delete, lambda key: store.create(key, b"")):
        with pytest.raises(ConfigError):
            call("../up")
    assert bucket.requests == []


def test_a_failed_download_leaves_nothing(
    bucket: ScriptedBucket, store: ObjectStore, tmp_path: Path
) -> None:
    bucket.enqueue_responses(403, 403, 403)
    with pytest.raises(StorePermissionError):
        store.get_file("a", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_contains_no_secret_of_the_environment(
    store: ObjectStore, bucket: ScriptedBucket
) -> None:
    pickled = pickle.dumps(store)
    assert b"something" not in pickled
    pickle.loads(pickled).put("a", b"x")
    assert bucket.objects["/bucket/a"] == b"x"


def test_a_small_file_is_retried_by_the_policy_of_calls(
    bucket: ScriptedBucket, store: ObjectStore, tmp_path: Path
) -> None:
    """A hanging request for a small file must time out soon."""
    (tmp_path / "small").write_bytes(b"x")
    bucket.enqueue_responses(503, 503)
    store.put_file("a", tmp_path / "small")
    assert len(bucket.requests) == 3
    assert bucket.objects["/bucket/a"] == b"x"


def test_a_large_object_uses_the_transfer_timeout(bucket: ScriptedBucket) -> None:
    """On a slow network the timeout of calls would fail every attempt."""
    store = ObjectStore(RootUrl.parse(bucket.url), RetryPolicy(max_attempts=1))
    bucket.enqueue_responses(503)
    store.put("a", bytes(2**20 + 1))
    assert len(bucket.requests) == 2  # by the client that insists: the store itself tried once
    assert len(bucket.objects["/bucket/a"]) == 2**20 + 1
