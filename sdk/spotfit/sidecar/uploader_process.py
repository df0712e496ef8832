"""The program of the uploader process: executes upload jobs of workers, which it may outlive."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import NoReturn

from spotfit.checkpoint.manifest import manifest_digest
from spotfit.checkpoint.writer import (
    UploadedManifests,
    UploadQueue,
    decode_upload_job,
    delete_local_copy,
    load_upload_job,
    run_upload_job,
    upload_snapshot,
    warn_while_slow,
)
from spotfit.code import function_pickle
from spotfit.core.codec import decoder
from spotfit.core.ids import RunId
from spotfit.host import process
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.protocol.agent_sidecar import FromUploader, StartUpload, UploadDone, UploadError
from spotfit.security.run_key import RunKey
from spotfit.sidecar.process_setup import SidecarConnection
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import PATIENT_RETRY_POLICY

SendMessage = Callable[[FromUploader], None]
# What this process has uploaded, so that incremental snapshots need not look in the bucket.
_upload_cache = UploadedManifests()


def main(socket_fd: int) -> NoReturn:
    """Execute upload jobs for the agent until it closes the socket, then exit the process.

    `socket_fd`: the inherited end of a socket pair. Uploads in progress are then abandoned.
    """
    process.set_process_name("spotfit-uploads")
    connection = SidecarConnection(socket_fd, decoder(StartUpload))
    server = UploadServer(connection.send)
    while (request := connection.receive()) is not None:
        server.submit(request)
    os._exit(0)  # without waiting for uploads: nothing could report them


class UploadServer:
    """Runs upload jobs in the uploader process, with one queue and thread per rank.

    The jobs of one rank run in order, those of several in parallel. `send` is called by these
    threads.
    """

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        self._queues: dict[int, UploadQueue] = {}

    def submit(self, request: StartUpload) -> None:
        """Queue a job; returns at once. `UploadDone` or `UploadError` is sent when it ends.

        A failed job does not stop later ones.
        """
        # In order, because a job may share files with the previous one of its rank.
        queue = self._queues.setdefault(request.rank, UploadQueue(_raise_unexpected))
        queue.put(partial(self._upload, request))

    def _upload(self, request: StartUpload) -> None:
        """Execute a snapshot job or a pickled files job, and send its result."""
        try:
            store = _open_store(request.storage_url, request.secret, request.run_id)
            if (snapshot := decode_upload_job(request.upload_job)) is not None:
                with warn_while_slow(snapshot.manifest.name):
                    manifest = upload_snapshot(store, snapshot, _upload_cache)
            else:
                job = load_upload_job(request.upload_job)
                manifest = run_upload_job(job, store)
                if job.delete_after_upload:
                    delete_local_copy(job.checkpoint, store)
        except BaseException as error:  # noqa: BLE001 - reported to the worker, whatever it is
            raised = function_pickle.to_failure_message(error)
            self._send(
                UploadError(
                    job_id=request.job_id,
                    traceback_text=raised.traceback_text,
                    pickled_exception=raised.pickled_exception,
                )
            )
        else:
            self._send(
                UploadDone(
                    job_id=request.job_id,
                    size_bytes=manifest.size_bytes,
                    step=manifest.step,
                    manifest_digest=manifest_digest(manifest),
                )
            )


@cache
def _open_store(url: str, secret: str, run_id: RunId) -> Store:
    # Retries as long as a worker would; an agent that must not wait kills this process.
    store = open_store(url, PATIENT_RETRY_POLICY)
    return AuthenticatedStore(store, RunKey.from_text(secret, run_id))


def _raise_unexpected(error: BaseException) -> None:
    raise AssertionError("UploadServer._upload reports its own errors") from error
