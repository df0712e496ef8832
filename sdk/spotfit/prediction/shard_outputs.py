"""The output folder of a prediction: one object per shard, records, and the manifest.

| object | content | written by |
|---|---|---|
| `_job.json` | what is predicted, and its fingerprint | rank 0 of the first round, by `create` |
| `_inputs/…` | rows that were passed in memory | `predict()`, which deletes them at the end |
| `part-00000.parquet` | the predictions of a shard | one worker, by `create`: never replaced |
| `_records/part-00000.json` | rows, size and hash of that object | a worker, afterwards |
| `_manifest.json` | all records; readers take it as the commit | rank 0, once all are written |

Readers such as pyarrow and Spark ignore names that begin with '_'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import AlreadyExistsError, ConfigError, IntegrityError, NotFoundError
from spotfit.prediction.batches import FileFormat, count_rows
from spotfit.store.api import Store
from spotfit.store.retry import PATIENT_RETRY_POLICY, RetryPolicy, call_with_retries, repeat_read
from spotfit.store.transfer import concurrent_map, download_bytes

StructT = TypeVar("StructT", bound=msgspec.Struct)

JOB_KEY = "_job.json"
MANIFEST_KEY = "_manifest.json"
RECORD_FOLDER = "_records"


class PredictionJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction computes, stored before its first output."""

    fingerprint: str
    """Of inputs, checkpoint, predictor and formats. Outputs of another job are not continued."""
    code: str
    """Fingerprint of the predictor's code. A change is logged: the outputs of both are mixed."""
    shards: int
    output_format: FileFormat


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A written output object."""

    name: str
    """Of the shard, such as "part-00000"."""
    input: str
    """URL of the input file, or the item that was read."""
    rows: int
    size_bytes: int
    sha256: str


class PredictionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All outputs of a finished prediction."""

    fingerprint: str
    output_format: FileFormat
    rows: int
    size_bytes: int
    shards: tuple[ShardRecord, ...]


_record_decoder = decoder(ShardRecord)


def output_key(name: str, output_format: FileFormat) -> str:
    """Return the key of a shard's output, such as "part-00000.parquet"."""
    return f"{name}.{output_format}"


def read_job(output: Store, job: PredictionJob) -> PredictionJob | None:
    """Return the job that the folder has, or None for an unused folder.

    Raises `ConfigError` if that is another job than `job`, or the folder has other files.
    """
    existing = _read_struct(output, JOB_KEY, PredictionJob)
    if existing is None:
        _check_unused(output)
    elif existing.fingerprint != job.fingerprint:
        raise ConfigError(
            f"The output folder {output.url} has predictions of another job: inputs=, checkpoint=, "
            "the predictor, its arguments or a format differ.",
            do="Set another output=, or delete that folder if nothing needs it.",
        )
    return existing


def begin_job(output: Store, job: PredictionJob) -> None:
    """Store the job in an unused folder, before its first output. Raises as `read_job`."""
    if read_job(output, job) is None:
        with suppress(AlreadyExistsError):  # by another process at the same time
            output.create(JOB_KEY, encode(job))
        read_job(output, job)


def find_manifest(output: Store) -> PredictionManifest | None:
    """Return the manifest, or None if the prediction is not finished. Raises `IntegrityError`."""
    return _read_struct(output, MANIFEST_KEY, PredictionManifest)


def read_manifest(output: Store) -> PredictionManifest:
    """Return the manifest of a finished prediction. Raises `NotFoundError` or `IntegrityError`."""
    manifest = find_manifest(output)
    if manifest is None:
        raise NotFoundError(
            f"There is no finished prediction in {output.url}.",
            do="Check the URL, or call predict() with the same arguments to finish it.",
        )
    return manifest


def _check_unused(output: Store) -> None:
    # Names with '_' or '.' are those of other tools, and of the probe of the storage.
    found = next((info.key for info in output.list() if info.key[0] not in "_."), None)
    if found is not None:
        raise ConfigError(
            f"The output folder {output.url} has files of another program, such as {found}.",
            do="Set output= to an empty or new folder.",
        )


def _read_struct(store: Store, key: str, kind: type[StructT]) -> StructT | None:
    """Return the decoded object, None if there is none. Raises `IntegrityError`."""
    try:
        return repeat_read(lambda: decoder(kind).decode(store.get(key)))
    except NotFoundError:
        return None
    except DECODE_ERRORS as error:
        raise IntegrityError(
            f"The object {key} in {store.url} is corrupt: {error}",
            do="Delete the output folder and predict again.",
        ) from error


class ShardOutputs:
    """Reads and writes the outputs of one job. Used by one worker, without state of its own."""

    def __init__(self, output: Store, job: PredictionJob) -> None:
        self._store = output
        self._job = job

    @property
    def output_format(self) -> FileFormat:
        """The format of the outputs."""
        return self._job.output_format

    def begin(self) -> None:
        """Store the job, unless the folder has it. Raises as `begin_job`."""
        begin_job(self._store, self._job)

    def recorded(self) -> frozenset[str]:
        """Return the names of shards with an output and a record, from a listing."""
        return frozenset(
            info.key.removeprefix(f"{RECORD_FOLDER}/").removesuffix(".json")
            for info in self._store.list(RECORD_FOLDER)
        )

    def write(
        self,
        name: str,
        body: bytes,
        *,
        source: str,
        retry_policy: RetryPolicy = PATIENT_RETRY_POLICY,
    ) -> ShardRecord:
        """Write the output of a shard unless it exists, and the record of what is stored.

        Of several workers with the same shard one writes; the others discard their result. Repeats
        failed requests within `retry_policy`. Raises `StoreError`.
        """
        key = output_key(name, self._job.output_format)
        try:
            # A repeated create may find the object of the first attempt, whose response was lost.
            # That is no error here, because the record is made from the stored object.
            call_with_retries(lambda: self._store.create(key, body), retry_policy)
        except AlreadyExistsError:
            body = download_bytes(self._store, key)
        record = ShardRecord(
            name=name,
            input=source,
            rows=count_rows(body, self._job.output_format),
            size_bytes=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
        )
        self._store.put(_record_key(name), encode(record))
        return record

    def write_manifest(self, names: Sequence[str]) -> PredictionManifest:
        """Write the manifest of these shards, and return it. All must be recorded.

        Raises `IntegrityError` if an output is missing or its size differs from its record.
        """
        sizes = {info.key: info.size_bytes for info in self._store.list()}
        records = tuple(concurrent_map(self._read_record, names))
        wrong = [
            record.name
            for record in records
            if sizes.get(output_key(record.name, self._job.output_format)) != record.size_bytes
        ]
        if wrong:
            raise IntegrityError(
                f"The outputs of {', '.join(wrong[:3])} in {self._store.url} are missing or differ "
                "from their records.",
                do="Another process changed the folder during the prediction. Delete it and "
                "predict again.",
            )
        manifest = PredictionManifest(
            fingerprint=self._job.fingerprint,
            output_format=self._job.output_format,
            rows=sum(record.rows for record in records),
            size_bytes=sum(record.size_bytes for record in records),
            shards=records,
        )
        # Its content follows from immutable objects: writing it again changes nothing.
        self._store.put(MANIFEST_KEY, encode(manifest))
        return manifest

    def _read_record(self, name: str) -> ShardRecord:
        return repeat_read(lambda: _record_decoder.decode(self._store.get(_record_key(name))))


def _record_key(name: str) -> str:
    return f"{RECORD_FOLDER}/{name}.json"
