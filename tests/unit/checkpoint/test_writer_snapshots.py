"""Uploads of snapshots: unchanged chunks are shared with earlier ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.committed import check_present, open_committed
from spotfit.checkpoint.format import SnapshotIndex, split_into_chunks
from spotfit.checkpoint.gc import delete_checkpoint
from spotfit.checkpoint.reader import open_committed_snapshot
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.writer import (
    SnapshotUploadJob,
    UploadedManifests,
    decode_upload_job,
    encode_upload_job,
    upload_snapshot,
)
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_manifest, ready_in_store, save_checkpoint
from tests.unit.checkpoint.snapshots import (
    LARGE_PIECE_BYTES,
    make_pieces,
    random_bytes,
    upload_test_snapshot,
    write_segment,
)

FROZEN = random_bytes(1, LARGE_PIECE_BYTES)


def chunks_in(store: MemoryStore, name: str) -> int:
    return sum(found.key.startswith(f"{name}/chunks/") for found in store.list())


@pytest.mark.parametrize("remembers", [True, False])
def test_unchanged_chunks_are_not_uploaded_again(tmp_path: Path, *, remembers: bool) -> None:
    store, known = MemoryStore(), UploadedManifests()
    upload_test_snapshot(
        store, tmp_path, "a", [FROZEN, random_bytes(2, LARGE_PIECE_BYTES)], known=known
    )
    again = upload_test_snapshot(
        store,
        tmp_path,
        "b",
        [FROZEN, random_bytes(3, LARGE_PIECE_BYTES)],
        base="a",
        known=known if remembers else None,
    )
    assert chunks_in(store, "b") == 1
    assert [file.source_prefix for file in again.files if file.source_prefix] == ["a"]


def test_a_shared_chunk_survives_the_deletion_of_its_checkpoint(tmp_path: Path) -> None:
    """After the deletion of a and b, c still has the chunk that a uploaded."""
    store, known = MemoryStore(), UploadedManifests()
    for name, base, n in (("a", "", 2), ("b", "a", 3), ("c", "b", 4)):
        upload_test_snapshot(
            store,
            tmp_path,
            name,
            [FROZEN, random_bytes(n, LARGE_PIECE_BYTES)],
            base=base,
            known=known,
        )
    delete_checkpoint(store, "a")
    assert chunks_in(store, "a") == 1
    delete_checkpoint(store, "b")
    saved = open_committed_snapshot(store, "c")
    assert saved is not None
    part_of_c = saved.readers[0]
    found = [bytes(part_of_c.fetch(chunk)) for chunk in part_of_c.index.chunks]
    assert found == [FROZEN, random_bytes(4, LARGE_PIECE_BYTES)]
    delete_checkpoint(store, "c")
    assert list(store.list()) == []


def test_a_ready_snapshot_is_marked_as_snapshot(tmp_path: Path) -> None:
    store = MemoryStore()
    upload_test_snapshot(store, tmp_path, "a", [FROZEN])
    save_checkpoint(store, tmp_path / "files", make_manifest("own"), x="1")
    assert {one.name: one.is_snapshot for one in ready_in_store(store, ())} == {
        "a": True,
        "own": False,
    }


def test_without_a_parent_no_chunks_are_shared(tmp_path: Path) -> None:
    """A checkpoint that is not the parent may be deleted during the upload."""
    store, known = MemoryStore(), UploadedManifests()
    upload_test_snapshot(store, tmp_path, "a", [FROZEN], known=known)
    upload_test_snapshot(store, tmp_path, "b", [FROZEN], known=known)
    assert (chunks_in(store, "a"), chunks_in(store, "b")) == (1, 1)


def test_a_snapshot_can_be_opened_as_a_checkpoint(tmp_path: Path) -> None:
    """Its directory also contains the files of other ranks."""
    store = open_store(str(tmp_path / "bucket"))
    upload_test_snapshot(store, tmp_path / "s", "a", [FROZEN])
    upload_test_snapshot(
        store, tmp_path / "s", "b", [FROZEN, random_bytes(2, LARGE_PIECE_BYTES)], base="a"
    )
    check_present(store, "b")
    with open_committed(store, "b").as_directory() as directory:
        sizes = [path.stat().st_size for path in Path(directory, "chunks").iterdir()]
        assert Path(directory, "index-0.json").exists()
    assert sizes == [LARGE_PIECE_BYTES, LARGE_PIECE_BYTES]
    shared = f"a/{open_committed_snapshot(store, 'a').readers[0].index.chunks[0].file}"  # type: ignore[union-attr]
    store.put(shared, random_bytes(9, LARGE_PIECE_BYTES))
    with (
        pytest.raises(IntegrityError, match="chunks/"),
        open_committed(store, "b").as_directory(),
    ):
        pass
    store.delete(shared)
    with pytest.raises(IntegrityError, match="chunks/"):
        check_present(store, "b")


def test_an_empty_segment_leaves_no_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "s").write_bytes(bytes(5000))
    with pytest.raises(IntegrityError):
        upload_snapshot(store, SnapshotUploadJob(str(tmp_path / "s"), make_manifest("a")))
    assert list(store.list()) == []


def test_a_segment_overwritten_during_its_upload_leaves_no_manifest(tmp_path: Path) -> None:
    """The rank reuses the segment for the next step."""
    pieces = make_pieces([LARGE_PIECE_BYTES])
    index = SnapshotIndex(
        rank=0, world_size=1, step=5, pieces=pieces, chunks=split_into_chunks(pieces)
    )
    segment = ShmSegment.create(tmp_path / "s", index.size_bytes)
    segment.publish(index)

    class Slow(MemoryStore):
        def put(self, key: str, body: Any) -> None:
            super().put(key, body)
            segment.invalidate()
            segment.publish(replace(index, step=6))

    store = Slow()
    with pytest.raises(IntegrityError, match="was overwritten during its upload"):
        upload_snapshot(store, SnapshotUploadJob(str(segment.path), make_manifest("a")))
    assert [found.key for found in store.list() if found.key.startswith(keys.MANIFESTS)] == []


def test_a_job_is_equal_after_decoding() -> None:
    job = SnapshotUploadJob("/memory/x", make_manifest("a"), "b")
    assert decode_upload_job(encode_upload_job(job)) == job
    assert decode_upload_job(b"\x80pickle") is None


def test_default_metadata_are_copied_into_a_snapshot(tmp_path: Path) -> None:
    store = MemoryStore()
    key = keys.default_metadata(hashlib.sha256(b'{"a":1}').hexdigest())
    store.put(key, b'{"a":1}')
    segment = write_segment(tmp_path / "s", [b"weights"])
    part = replace(make_manifest("a"), default_metadata=key)
    upload_snapshot(store, SnapshotUploadJob(str(segment), part))
    assert open_committed(store, "a").get_metadata() == {"a": 1}
