"""A rank's snapshot from its segment to the bucket: new chunks, the index, then the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.drop import note_sharing
from spotfit.checkpoint.manifest import Manifest, manifests_of, newest_complete
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Chunk, index_file, write_index
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.store.api import Store
from spotfit.store.marks import mark_of
from spotfit.store.transfer import FileRecord

_AT_ONCE = 4


class SnapshotParcel(msgspec.Struct, frozen=True, tag="snapshot"):
    """One rank's snapshot that is to be brought."""

    segment: str
    """Where it lies on this machine."""
    part: Manifest
    base: str = ""
    """A committed checkpoint that stays meanwhile, and whose chunks this one may share."""


_parcels = decoder(SnapshotParcel)


def packed(parcel: SnapshotParcel) -> bytes:
    """For the process that brings it."""
    return encode(parcel)


def unpacked(body: bytes) -> SnapshotParcel | None:
    """What was packed; None for what is no snapshot."""
    return _parcels.decode(body) if body.startswith(b"{") else None


class Brought:
    """What this process has brought before: of that it need not ask the bucket."""

    def __init__(self) -> None:
        self._known: dict[int, Manifest] = {}
        """By rank, the last."""

    def note(self, manifest: Manifest) -> None:
        """These files are there."""
        self._known[manifest.rank] = manifest

    def shared_by(self, store: Store, base: str, rank: int) -> dict[str, FileRecord]:
        """Chunks of that checkpoint, by mark."""
        last = self._known.get(rank)
        parts = (
            (last,) if last and last.name == base else newest_complete(manifests_of(store, base))
        )
        return {file.mark: file for part in parts for file in _placed(part) if file.mark}


def bring_snapshot(store: Store, parcel: SnapshotParcel, known: Brought | None = None) -> Manifest:
    """Upload what is new of it, then its index, then its manifest; may be called again.

    `store` is rooted at the run. A chunk that `base` holds is not sent but shared. Raises
    `IntegrityError` where the segment holds no whole snapshot, or another one in the end.
    """
    part, known = parcel.part, known or Brought()
    there = known.shared_by(store, parcel.base, part.rank) if parcel.base else {}
    with Segment.open(Path(parcel.segment)) as segment:
        seal, index = segment.seal, segment.index()
        body = segment.bytes

        def send(chunk: Chunk) -> Chunk:
            piece = body[chunk.start : chunk.end]
            sent = replace(chunk, mark=mark_of(piece))
            if found := there.get(sent.mark):
                return replace(sent, at=found.at)
            store.put(f"{part.folder}/{sent.file}", piece)
            return sent

        with ThreadPoolExecutor(_AT_ONCE, "spotfit-chunks") as senders:
            chunks = tuple(senders.map(send, index.chunks))
        body.release()
        if segment.seal != seal:
            raise IntegrityError(
                f"The snapshot in {parcel.segment} was written over on its way to {part.name}."
            )
    written = write_index(replace(index, chunks=chunks))
    name = index_file(index.rank)
    store.put(f"{part.folder}/{name}", written)
    first = FileRecord(name, len(written), hashlib.sha256(written).hexdigest())
    manifest = replace(part, files=(first, *_records(chunks)), step=index.step)
    note_sharing(store, manifest, (chunk.at for chunk in chunks))
    store.put(part.key, encode(manifest))
    known.note(manifest)
    return manifest


def _records(chunks: Iterable[Chunk]) -> Iterable[FileRecord]:
    """Each file once, though several chunks may hold the same."""
    named = {
        chunk.file: FileRecord(chunk.file, chunk.size_bytes, "", chunk.at, chunk.mark)
        for chunk in chunks
    }
    return named.values()


def _placed(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Its files, each with the folder it lies in."""
    return tuple(replace(file, at=file.at or manifest.folder) for file in manifest.files)
