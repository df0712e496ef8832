"""Uploading one rank's part of a checkpoint: user files from a directory, snapshots from a segment.

Both write the files first, then references to files in the folders of other checkpoints, then the
manifest. A process that dies in between leaves no manifest, so an incomplete part is never read.

An `UploadJob` holds the files of one rank's report. The worker runs it itself, in the order of the
reports (`UploadQueue`), or leaves it to the uploader process.
"""

from __future__ import annotations

import hashlib
import pickle
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import DEFAULT_METADATA_FILE, METADATA_FILE, Checkpoint
from spotfit.checkpoint.committed import UploadFn
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
from spotfit.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    TransientStoreError,
)
from spotfit.host import env, log
from spotfit.host.system import SystemClock
from spotfit.ledger import keys
from spotfit.store.api import Store
from spotfit.store.transfer import (
    FileRecord,
    compute_content_hash,
    list_files,
    upload_tree,
)

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
    `CheckpointNotFoundError` if the directory does not exist or is a file, and the errors of the
    store.
    """
    if directory.is_file():
        raise CheckpointNotFoundError(
            f"The reported checkpoint {directory} is a file, not a directory.",
            do="Report the directory that contains the file: Checkpoint.from_directory(directory).",
        )
    if not directory.is_dir():
        raise CheckpointNotFoundError(
            f"The directory of the reported checkpoint, {directory}, does not exist.",
            do="Report the directory before it is removed, and use a separate directory on each "
            "rank: a SYNC report inside the `with` block of a temporary directory, an ASYNC one "
            "without such a block.",
        )
    return _write_manifest(store, manifest, upload_tree(store, manifest.folder, directory), parent)


def save_existing_files(
    store: Store, manifest: Manifest, *, parent: str = "", may_be_empty: bool = False
) -> Manifest:
    """Write and return the manifest of files that the user has put into `manifest.folder`.

    Called for a report without upload, or after the user's upload function. `store` is rooted at
    the run; `parent` is as in `save_directory`. The files are not read: restoring verifies only
    their names and sizes. Idempotent. If the folder has no files or does not exist, raises
    `ConfigError`, or with `may_be_empty` logs a warning and writes a manifest without files.
    """
    sizes = list_files(store, manifest.folder)
    if not sizes and not may_be_empty:
        raise ConfigError(
            f"The reported checkpoint folder {manifest.folder} in {store.url} has no files.",
            do="Write its files before calling report(), or report the folder that contains them.",
        )
    if not sizes:
        log.warning(
            "checkpoint.empty",
            name=manifest.name,
            rank=manifest.rank,
            reason=f"the folder {manifest.folder} in {store.url} has no files",
        )
    # Without hashes: reading the files back could take longer than writing them did.
    files = [FileRecord(name, size_bytes, "") for name, size_bytes in sizes.items()]
    return _write_manifest(store, manifest, files, parent)


def _write_manifest(
    store: Store, part: Manifest, files: Sequence[FileRecord], parent: str
) -> Manifest:
    # A folder without files may not exist, and the user has not written to it.
    added = _add_default_metadata(store, part) if files else ()
    files = [file for file in files if not added or file.name != DEFAULT_METADATA_FILE]
    inherited = tuple(_inherited_files(store, parent, part, files)) if parent else ()
    manifest = replace(part, files=(*files, *added, *inherited))
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
    replaced = {METADATA_FILE, DEFAULT_METADATA_FILE, *(file.name for file in files)}
    earlier = latest_manifest_of(store, parent, manifest.rank)
    if earlier is None:
        return
    for file in earlier.files:
        folder = file.source_prefix or earlier.folder
        # Files in the same folder: the user overwrites a folder of their own in place, and what
        # was there before has been replaced or deleted.
        if file.name not in replaced and folder != manifest.folder:
            yield replace(file, source_prefix=folder)


def _add_default_metadata(store: Store, part: Manifest) -> tuple[FileRecord, ...]:
    """Copy the metadata of the run into the checkpoint's folder; return the record of the file.

    Only for the first rank, which writes the file for all. A copy, so that the folder can be used
    without the run.
    """
    if not part.default_metadata or part.rank != min(part.ranks):
        return ()
    body = _read_default_metadata(store, part.default_metadata)  # type: ignore[arg-type]
    store.put(f"{part.folder}/{DEFAULT_METADATA_FILE}", body)
    digest = hashlib.sha256(body).hexdigest()
    return (FileRecord(DEFAULT_METADATA_FILE, len(body), digest),)


# The same object for all checkpoints of a fit.
@lru_cache(maxsize=1)
def _read_default_metadata(store: Store, key: str) -> bytes:
    body = store.get(key)
    if key != keys.default_metadata(hashlib.sha256(body).hexdigest()):
        raise IntegrityError(
            f"The object {key} in {store.url} was changed: its name is not the hash of it.",
            do="Start the run again, which writes the object again.",
            object=key,
        )
    return body


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

    None if the bytes are the other kind of job: use `load_upload_job`.
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

        Only the chunks of `rank` if its last recorded manifest is of `parent`. Otherwise those of
        all ranks, whose manifests are read from `store`, rooted at the run; then empty if the
        parent is incomplete.
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

    Called by the uploader process; in local mode, by the training process. `store` is rooted at the
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
    metadata = _add_default_metadata(store, part)
    files = (index_record, *metadata, *_chunk_records(chunks))
    manifest = replace(part, files=files, step=index.step)
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


# --- Files of a report ----------------------------------------------------------------------------


# User functions mostly write with libraries that retry by themselves, so two more attempts are
# enough: one soon, and one after a moment of throttling.
_RETRY_DELAYS_S = (0.5, 2.0)
# pyarrow raises a plain OSError for every failure; only its text shows that S3 was overloaded.
_TRANSIENT_PATTERN = re.compile(
    "AWS Error (SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|NETWORK_CONNECTION|UNKNOWN)"
)


class UploadJob(NamedTuple):
    """What to upload, and how. Another process of this node can unpickle and run it."""

    checkpoint: Checkpoint
    manifest: Manifest
    """The manifest to write, still without files."""
    parent: str = ""
    """Earlier checkpoint of the same requested name; its files that are not replaced are listed in
    this one as well."""
    delete_after_upload: bool = False
    """Whether to delete the local copy after the upload."""

    def to_bytes(self) -> bytes:
        """Pickle the job for the uploader process, which cannot import user-defined classes.

        A subclass of `Checkpoint` becomes a plain one. `load_upload_job` is the inverse.
        """
        return pickle.dumps(self._replace(checkpoint=self.checkpoint.without_extras()))


def load_upload_job(body: bytes) -> UploadJob:
    """Unpickle a job that a worker of this node has sent; the inverse of `UploadJob.to_bytes`.

    Called by the uploader process. Only for bytes from the run's own workers: unpickling runs code.
    """
    job = pickle.loads(body)  # noqa: S301 - from this node's worker, over its own socket
    assert isinstance(job, UploadJob)
    return job


def run_upload_job(job: UploadJob, store: Store) -> Manifest:
    """Upload the files, then write and return the manifest, now with its files. Idempotent.

    Called by a worker or by the uploader process. `store` is rooted at the run. Blocks, and logs a
    warning while the upload is slow. The local copy stays. Raises
    `CheckpointNotFoundError` if the local directory does not exist, `IntegrityError` for missing or
    corrupt files of a checkpoint in a bucket, and the errors of the store.
    """
    # Also while a checkpoint in another bucket is downloaded first.
    with warn_while_slow(job.manifest.name), job.checkpoint.as_directory() as directory:
        return save_directory(store, Path(directory), job.manifest, parent=job.parent)


def upload_with_user_fn(upload_fn: UploadFn, checkpoint: Checkpoint, name: str) -> Any:
    """Return what the user-defined upload function returns, without checking it.

    `name` is the checkpoint's directory name, such as "checkpoint_000003". Calls the function
    again, after 0.5 s and 2 s, if it raises a transient storage error; any other exception, and the
    third, propagates. Blocks, and logs a warning while it is slow.
    """
    with warn_while_slow(name):
        for delay_s in _RETRY_DELAYS_S:
            try:
                return upload_fn(checkpoint, name)
            except Exception as error:  # raised by user code
                if not (
                    isinstance(error, TransientStoreError) or _TRANSIENT_PATTERN.search(str(error))
                ):
                    raise
                log.warning("checkpoint.upload_retry", name=name, reason=str(error))
            SystemClock().wait(delay_s)
        return upload_fn(checkpoint, name)


def delete_local_copy(checkpoint: Checkpoint, store: Store) -> None:
    """Delete the uploaded local directory, unless it is inside the run's own storage.

    Called after the upload if the report has `delete_after_upload`. `store` is rooted at the run; a
    directory in it may be an earlier checkpoint, or hold files of ranks that have not uploaded them
    yet. Does nothing for a checkpoint in a bucket; errors are ignored.
    """
    local = checkpoint.local_directory
    if local is not None and checkpoint.folder_relative_to(store) is None:
        shutil.rmtree(local, ignore_errors=True)


@contextmanager
def warn_while_slow(name: str) -> Iterator[None]:
    """Log a warning at intervals while the block, an upload, runs; it is not stopped.

    The interval is SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S, 60 s by default. `name` is the
    checkpoint's name for the log. Exceptions of the block propagate.
    """
    interval_s = env.read(env.UPLOAD_WARN_INTERVAL_S)
    finished = threading.Event()

    def warn() -> None:
        elapsed_s = 0.0
        while not finished.wait(interval_s):
            elapsed_s += interval_s
            log.warning("checkpoint.upload_slow", name=name, elapsed_s=elapsed_s)

    # A thread, because the upload itself may block in user code or in a library.
    threading.Thread(target=warn, name="spotfit-upload-watch", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


# --- Background uploads of a worker ---------------------------------------------------------------


UploadTask = Callable[[], None]


class UploadQueue:
    """Runs upload tasks one after the other on a thread that starts with the first task.

    The first task that raises is passed to `on_error`, and no further task runs.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[UploadTask] = queue.SimpleQueue()
        self._idle = threading.Condition()  # guards the two fields below
        self._pending_count = 0
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def put(self, task: UploadTask) -> None:
        """Run the task on the queue's thread, after the tasks that were put before; does not block.

        After a task has raised, tasks are accepted but never run.
        """
        with self._idle:
            self._pending_count += 1
        self._tasks.put(task)
        if self._thread is None:
            # A daemon: a worker whose function has raised must exit without waiting for uploads.
            self._thread = threading.Thread(
                target=self._run_all, name="spotfit-upload", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Block, without a timeout, until all tasks are done or one has failed.

        Raises nothing: the failure was passed to `on_error`, on the queue's thread.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._pending_count == 0 or self._has_failed)

    def _run_all(self) -> None:
        while not self._has_failed:
            task = self._tasks.get()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - runs the user's upload function
                # Before the flag is set: wait() must not return while the error is unreported.
                self._on_error(error)
                self._has_failed = True
            with self._idle:
                self._pending_count -= 1
                self._idle.notify_all()
