import pickle
from pathlib import Path

import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.budget import Budget
from spotfit.store.objects import ObjectStore, _ours
from spotfit.store.url import RootUrl
from tests.unit.store.conftest import ScriptedBucket


@pytest.fixture
def store(bucket: ScriptedBucket) -> ObjectStore:
    return ObjectStore(RootUrl.parse(bucket.url), Budget(attempts=3, longest_pause_s=0.0))


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_be_repeated_is_repeated(
    bucket: ScriptedBucket, store: ObjectStore, status: int
) -> None:
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: store.delete("a"),
    ):
        bucket.asked.clear()
        bucket.will_answer(status, status)
        call()
        assert len(bucket.asked) == 3


def test_the_budget_ends(bucket: ScriptedBucket, store: ObjectStore) -> None:
    bucket.will_answer(*[503] * 9)
    with pytest.raises(TransientStoreError, match="Code: why"):
        store.get("a")
    assert len(bucket.asked) == 3


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_create_is_never_repeated(
    bucket: ScriptedBucket, store: ObjectStore, status: int
) -> None:
    bucket.will_answer(status)
    with pytest.raises(TransientStoreError):
        store.create("a", b"x")
    assert bucket.asked == [("PUT", "/bucket/a")]


@pytest.mark.parametrize("status", [409, 412])
def test_a_create_that_lost_says_so(
    bucket: ScriptedBucket, store: ObjectStore, status: int
) -> None:
    bucket.will_answer(status)
    with pytest.raises(AlreadyExistsError):
        store.create("a", b"x")
    assert len(bucket.asked) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (401, "Code", StorePermissionError, "may not"),
        (403, "AccessDenied", StorePermissionError, "AccessDenied: why"),
        (404, "NoSuchKey", NotFoundError, "no a in"),
        (404, "NoSuchBucket", StoreError, "no such bucket"),
        (400, "AuthorizationHeaderMalformed", StoreError, "AWS_REGION"),
        (301, "PermanentRedirect", StoreError, "AWS_REGION"),
        (400, "Odd", StoreError, "refused"),
    ],
)
def test_what_a_server_says_becomes_ours(
    bucket: ScriptedBucket,
    store: ObjectStore,
    status: int,
    code: str,
    kind: type[StoreError],
    words: str,
) -> None:
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
    ):
        bucket.will_answer(status, code=code)
        with pytest.raises(StoreError, match=words) as told:
            call()
        assert type(told.value) is kind


@pytest.mark.parametrize("code", ["RequestTimeout", "ExpiredToken", "SlowDown"])
def test_what_passes_is_known_by_its_name_where_its_number_says_otherwise(
    bucket: ScriptedBucket, store: ObjectStore, code: str
) -> None:
    bucket.will_answer(400, code=code)
    store.put("a", b"x")
    assert len(bucket.asked) == 2
    bucket.will_answer(400, code=code)
    with pytest.raises(TransientStoreError, match=code):
        store.create("b", b"x")


def test_credentials_that_do_not_suffice_are_told_of_a_listing_too(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.will_answer(403)
    with pytest.raises(StorePermissionError):
        list(store.list())


def test_a_machine_without_a_role_lacks_credentials() -> None:
    refused = Exception(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - "
        "Server returned non-2xx status code: 403 Forbidden"
    )
    told = _ours(refused, "a", creating=True)
    assert isinstance(told, StorePermissionError)
    assert isinstance(told, TransientStoreError)
    assert "no credentials" in str(told)


@pytest.mark.usefixtures("bucket")
def test_a_server_that_is_not_there_is_a_passing_failure() -> None:
    nobody = RootUrl.parse("s3://bucket?endpoint_url=http://127.0.0.1:9")
    store = ObjectStore(nobody, Budget(attempts=1))
    with pytest.raises(TransientStoreError):
        store.create("a", b"")


def test_the_error_says_nothing_an_address_could_hide(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    bucket.will_answer(400)
    with pytest.raises(StoreError) as told:
        list(store.list())
    assert "list-type" not in str(told.value)
    assert told.value.__suppress_context__


def test_a_listing_goes_on_where_it_failed(bucket: ScriptedBucket, store: ObjectStore) -> None:
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
    bucket.will_answer(503)
    assert [found.key for found in listing] == [f"k{n:04}" for n in range(1, 1000)]


@pytest.mark.parametrize(
    ("after", "left"), [("k0", ["k1", "k2"]), ("k11", ["k2"]), ("k2", []), ("z", [])]
)
def test_a_server_that_does_not_heed_where_a_listing_begins_is_put_right(
    bucket: ScriptedBucket, store: ObjectStore, after: str, left: list[str]
) -> None:
    """Azurite is one."""
    keys = "".join(
        f"<Contents><Key>k{n}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for n in range(3)
    )
    whole = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
    bucket.objects["/bucket"] = whole.encode()
    assert [found.key for found in store.list(after=after)] == left


@pytest.mark.parametrize(
    "told",
    [
        "Error performing GET - Server returned non-2xx status code: 416 Range Not Satisfiable",
        "Generic MicrosoftAzure error: Wanted range starting at 9, but object was only 9 bytes",
    ],
)
def test_a_range_that_begins_at_the_end_is_told_apart(told: str) -> None:
    wrong = _ours(RuntimeError(told), "a", creating=False)
    assert "beyond the end" in wrong.what


def test_an_impossible_key_is_refused_before_anything_is_sent(
    bucket: ScriptedBucket, store: ObjectStore
) -> None:
    for call in (store.get, store.delete, lambda key: store.create(key, b"")):
        with pytest.raises(ConfigError):
            call("../up")
    assert bucket.asked == []


def test_a_failed_download_leaves_nothing(
    bucket: ScriptedBucket, store: ObjectStore, tmp_path: Path
) -> None:
    bucket.will_answer(403)
    with pytest.raises(StorePermissionError):
        store.get_file("a", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_holds_no_secret(store: ObjectStore, bucket: ScriptedBucket) -> None:
    pickled = pickle.dumps(store)
    assert b"something" not in pickled
    pickle.loads(pickled).put("a", b"x")
    assert bucket.objects["/bucket/a"] == b"x"


def test_a_small_file_is_sent_as_often_as_its_store_insists(
    bucket: ScriptedBucket, store: ObjectStore, tmp_path: Path
) -> None:
    """Big ones have time limits to their size; a hanging request for a small one must end soon."""
    (tmp_path / "small").write_bytes(b"x")
    bucket.will_answer(503, 503)
    store.put_file("a", tmp_path / "small")
    assert len(bucket.asked) == 3
    assert bucket.objects["/bucket/a"] == b"x"


def test_a_big_object_is_given_time_as_a_big_file_is(bucket: ScriptedBucket) -> None:
    """Ten seconds are too short for it on a slow wire, however often it is begun again."""
    store = ObjectStore(RootUrl.parse(bucket.url), Budget(attempts=1))
    bucket.will_answer(503)
    store.put("a", bytes(2**20 + 1))
    assert len(bucket.asked) == 2  # by the client that insists: the store itself tried once
    assert len(bucket.objects["/bucket/a"]) == 2**20 + 1
