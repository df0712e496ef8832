"""Uploading one rank's part of a checkpoint: user files from a directory, snapshots from a segment.

Both write the files first, then references to files in the folders of other checkpoints, then the
manifest. A process that dies in between leaves no manifest, so an incomplete part is never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import METADATA_FILE
from spotfit.checkpoint.committed import listed_sizes
from spotfit.checkpoint.format import Chunk, encode_index, index_filename
from spotfit.checkpoint.gc import write_references
from spotfit.checkpoint.manifest import (
    Manifest,
    latest_manifest_of,
    manifests_of,
    newest_complete_manifests,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, compute_content_hash, upload_tree

# Each chunk above 8 MiB is uploaded as parallel parts, so few chunks at a time saturate a network
# link; more would only take CPU time from the training processes of the node.
_MAX_CONCURRENT_UPLOADS = 4


# --- user files ----------------------------------------------------------------------------------


def save_directory(
    store: Store, directory: Path, manifest: Manifest, *, parent: str = ""
) -> Manifest:
    """Upload all files of `directory` to the checkpoint's folder, then write the manifest.

    `store` is rooted at the run; `manifest` names the checkpoint and rank, still without files.
    Returns the manifest with its files. Files that this rank saved to the checkpoint `parent` (''
    for none), and that the directory does not replace, are listed as well and not copied. Files of
    other ranks in the folder stay; a file of the same name is replaced. Blocks. Idempotent. Raises
    `ConfigError` if the directory does not exist, and the errors of the store.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"The directory of the reported checkpoint, {directory}, does not exist.",
            do="Report the directory before it is removed, and use a separate directory on each "
            "rank: a SYNC report inside the `with` block of a temporary directory, an ASYNC one "
            "without such a block.",
        )
    return _write_manifest(store, manifest, upload_tree(store, manifest.folder, directory), parent)


def save_existing_files(store: Store, manifest: Manifest, *, parent: str = "") -> Manifest:
    """Write and return the manifest of files that the user has put into `manifest.folder`.

    Called for a report without upload, or after the user's upload function. `store` is rooted at
    the run; `parent` is as in `save_directory`. The files are not read: restoring verifies only
    their names and sizes. Idempotent. Raises `ConfigError` if the folder has no files.
    """
    sizes = listed_sizes(store, manifest.folder)
    if not sizes:
        raise ConfigError(
            f"The reported checkpoint folder {manifest.folder} in {store.url} has no files.",
            do="Write its files before calling report(), or report the folder that contains them.",
        )
    # Without hashes: reading the files back could take longer than writing them did.
    files = [FileRecord(name, size_bytes, "") for name, size_bytes in sizes.items()]
    return _write_manifest(store, manifest, files, parent)


def _write_manifest(
    store: Store, part: Manifest, files: Sequence[FileRecord], parent: str
) -> Manifest:
    inherited = tuple(_inherited_files(store, parent, part, files)) if parent else ()
    manifest = replace(part, files=(*files, *inherited))
    # Before the manifest: garbage collection deletes files that no reference protects.
    write_references(
        store, manifest, (part.custom_folder, *(file.source_prefix for file in inherited))
    )
    store.put(part.key, encode(manifest))
    return manifest


def _inherited_files(
    store: Store, parent: str, manifest: Manifest, files: Sequence[FileRecord]
) -> Iterator[FileRecord]:
    """Yield files that this rank saved to the parent and has not replaced."""
    replaced = {METADATA_FILE, *(file.name for file in files)}
    earlier = latest_manifest_of(store, parent, manifest.rank)
    if earlier is None:
        return
    for file in earlier.files:
        folder = file.source_prefix or earlier.folder
        # Files in the same folder: the user overwrites a folder of their own in place, and what
        # was there before has been replaced or deleted.
        if file.name not in replaced and folder != manifest.folder:
            yield replace(file, source_prefix=folder)


# --- snapshots -----------------------------------------------------------------------------------


class SnapshotUploadJob(msgspec.Struct, frozen=True, tag="snapshot_upload_job"):
    """Upload of one rank's snapshot."""

    segment_path: str
    manifest: Manifest
    """The manifest to write, still without files."""
    parent: str = ""
    """Committed checkpoint whose chunks may be referenced. It is not deleted during the upload."""


_job_decoder = decoder(SnapshotUploadJob)


def encode_upload_job(job: SnapshotUploadJob) -> bytes:
    """Encode the job as JSON for the uploader process, which calls `decode_upload_job`."""
    return encode(job)


def decode_upload_job(body: bytes) -> SnapshotUploadJob | None:
    """Decode what `encode_upload_job` returned, in the uploader process.

    None if the bytes are the other kind of job, a pickled `upload_job.UploadJob`.
    """
    return _job_decoder.decode(body) if body.startswith(b"{") else None


class UploadedManifests:
    """The latest manifest that this process has written for each rank.

    The uploader process keeps one. It spares the requests for the manifests of the parent: mostly
    that is the previous snapshot.
    """

    def __init__(self) -> None:
        self._last_by_rank: dict[int, Manifest] = {}

    def record(self, manifest: Manifest) -> None:
        """Remember a manifest that was written, instead of the previous one of its rank."""
        self._last_by_rank[manifest.rank] = manifest

    def chunks_by_hash(self, store: Store, parent: str, rank: int) -> dict[str, FileRecord]:
        """Return chunks of checkpoint `parent` by content hash, with the folders that store them.

        Only this rank's chunks if its manifest is remembered; otherwise those of all ranks, for
        which the manifests are read from `store`, rooted at the run. Empty if the parent is
        incomplete.
        """
        last = self._last_by_rank.get(rank)
        parts = (
            (last,)
            if last and last.name == parent
            else newest_complete_manifests(manifests_of(store, parent))
        )
        return {
            file.content_hash: replace(file, source_prefix=file.source_prefix or part.folder)
            for part in parts
            for file in part.files
            if file.content_hash
        }


def upload_snapshot(
    store: Store, job: SnapshotUploadJob, uploaded: UploadedManifests | None = None
) -> Manifest:
    """Upload the new chunks of a segment, then its index, then its manifest, and return that.

    Called by the uploader process, and by the worker itself in local mode. `store` is rooted at the
    run. Chunks that the job's parent lists are referenced, not uploaded; `uploaded` remembers
    manifests for the next job. Blocks. Idempotent. Raises `IntegrityError` if the segment holds no
    complete snapshot or is overwritten meanwhile, and the errors of the store.
    """
    part, uploaded = job.manifest, uploaded or UploadedManifests()
    # Equal hashes mean equal bytes: unchanged tensors are stored once (decision 0040).
    known = uploaded.chunks_by_hash(store, job.parent, part.rank) if job.parent else {}
    with ShmSegment.open(Path(job.segment_path)) as segment:
        stamp, index = segment.version_stamp, segment.index()
        payload = segment.payload

        def upload_chunk(chunk: Chunk) -> Chunk:
            body = payload[chunk.start : chunk.end]
            hashed = replace(chunk, content_hash=compute_content_hash(body))
            if found := known.get(hashed.content_hash):
                return replace(hashed, source_prefix=found.source_prefix)
            store.put(f"{part.folder}/{hashed.file}", body)
            return hashed

        with ThreadPoolExecutor(_MAX_CONCURRENT_UPLOADS, "spotfit-chunks") as pool:
            chunks = tuple(pool.map(upload_chunk, index.chunks))
        payload.release()  # close() cannot unmap memory that has views
        # The worker reuses the segment if it rolled back; the chunks are then of two states.
        if segment.version_stamp != stamp:
            raise IntegrityError(
                f"The snapshot in {job.segment_path} was overwritten during its upload to "
                f"{part.name}.",
                do="No action is needed: a later save is uploaded instead.",
            )
    body = encode_index(replace(index, chunks=chunks))
    name = index_filename(index.rank)
    store.put(f"{part.folder}/{name}", body)
    # The index has a SHA-256: through it every chunk's hash is verified on restore.
    index_record = FileRecord(name, len(body), hashlib.sha256(body).hexdigest())
    manifest = replace(part, files=(index_record, *_chunk_records(chunks)), step=index.step)
    write_references(store, manifest, (chunk.source_prefix for chunk in chunks))
    store.put(part.key, encode(manifest))
    uploaded.record(manifest)
    return manifest


def _chunk_records(chunks: Sequence[Chunk]) -> Sequence[FileRecord]:
    """Return one record per file: chunks with equal bytes share one."""
    records = {
        chunk.file: FileRecord(
            name=chunk.file,
            size_bytes=chunk.size_bytes,
            sha256="",
            source_prefix=chunk.source_prefix,
            content_hash=chunk.content_hash,
        )
        for chunk in chunks
    }
    return tuple(records.values())
