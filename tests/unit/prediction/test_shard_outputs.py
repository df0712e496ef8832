"""Each output is created once; records and manifest describe what is stored."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError, TransientStoreError
from spotfit.prediction.shard_outputs import (
    PredictionJob,
    ShardOutputs,
    begin_job,
    read_job,
    read_manifest,
)
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.local import LocalStore
from spotfit.store.retry import RetryPolicy
from spotfit.store.url import RootUrl

JOB = PredictionJob(fingerprint="f1", code="c1", shards=2, output_format="jsonl")
NO_PAUSE = RetryPolicy(initial_backoff_s=0.0, max_backoff_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def outputs(store: Store) -> ShardOutputs:
    return ShardOutputs(store, JOB)


def test_an_output_is_never_replaced(store: Store, outputs: ShardOutputs) -> None:
    first = outputs.write("part-00000", b"1\n2\n", source="a")
    second = outputs.write("part-00000", b"other\n", source="a")
    assert store.get("part-00000.jsonl") == b"1\n2\n"
    assert first == second
    assert (first.rows, first.size_bytes) == (2, 4)
    assert first.sha256 == hashlib.sha256(b"1\n2\n").hexdigest()


def test_an_output_of_a_killed_worker_gets_its_record(store: Store, outputs: ShardOutputs) -> None:
    store.create("part-00000.jsonl", b"1\n")
    assert outputs.recorded() == frozenset()
    assert outputs.write("part-00000", b"1\n", source="a").rows == 1
    assert outputs.recorded() == {"part-00000"}


class LostResponses(LocalStore):
    """Creates the object and then reports a temporary failure."""

    def create(self, key: str, body: bytes) -> None:
        super().create(key, body)
        raise TransientStoreError("the response was lost")


def test_a_create_whose_response_was_lost_is_no_error(tmp_path: Path) -> None:
    store = LostResponses(RootUrl.parse(tmp_path))
    record = ShardOutputs(store, JOB).write("part-00000", b"1\n", source="a", retry_policy=NO_PAUSE)
    assert record.rows == 1
    assert store.get("part-00000.jsonl") == b"1\n"


def test_the_manifest_has_the_records_in_order(store: Store, outputs: ShardOutputs) -> None:
    for name, body in (("part-00001", b"3\n"), ("part-00000", b"1\n2\n")):
        outputs.write(name, body, source=name)
    written = outputs.write_manifest(["part-00000", "part-00001"])
    assert read_manifest(store) == written
    assert (written.rows, written.size_bytes) == (3, 6)
    assert [shard.name for shard in written.shards] == ["part-00000", "part-00001"]


def test_a_manifest_of_deleted_outputs_is_refused(store: Store, outputs: ShardOutputs) -> None:
    outputs.write("part-00000", b"1\n", source="a")
    store.delete("part-00000.jsonl")
    with pytest.raises(IntegrityError, match="part-00000"):
        outputs.write_manifest(["part-00000"])


def test_a_job_is_continued_by_the_same_job_only(store: Store) -> None:
    assert read_job(store, JOB) is None
    begin_job(store, JOB)
    begin_job(store, JOB)
    assert read_job(store, JOB) == JOB
    other = PredictionJob(fingerprint="f2", code="c1", shards=2, output_format="jsonl")
    with pytest.raises(ConfigError, match="another job"):
        begin_job(store, other)


def test_a_folder_with_other_files_is_refused(store: Store) -> None:
    store.put("_SUCCESS", b"")
    assert read_job(store, JOB) is None
    store.put("data.csv", b"")
    with pytest.raises(ConfigError, match=r"data\.csv"):
        read_job(store, JOB)


def test_a_corrupt_job_is_reported(store: Store) -> None:
    store.put("_job.json", b"{")
    with pytest.raises(IntegrityError, match="_job"):
        read_job(store, JOB)


def test_a_folder_without_a_manifest_is_not_finished(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no finished prediction"):
        read_manifest(store)
