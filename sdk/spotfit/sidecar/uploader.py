"""The agent's side of the uploader process, which completes uploads of workers that have exited."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from spotfit.core.codec import decoder
from spotfit.host import log
from spotfit.protocol.agent_sidecar import FromUploader, StartUpload, UploadDone, UploadError
from spotfit.protocol.worker_agent import RequestUpload
from spotfit.security.run_key import RunKey
from spotfit.sidecar.channel import SidecarChannel, StartSidecarFn

_message_decoder: msgspec.json.Decoder[FromUploader] = decoder(FromUploader)  # type: ignore[arg-type]

# A crash may come from the node (out of memory) or from a job; repeating a job that crashes the
# process would block all others.
_MAX_CRASHES = 3


class QueuedUpload(NamedTuple):
    """An upload requested by a worker of this node."""

    round: int
    rank: int
    request: RequestUpload
    is_snapshot: bool = False
    """Whether it is a snapshot. Training continues if a snapshot is lost."""


OnUploadFinishedFn = Callable[[QueuedUpload, UploadDone | UploadError], None]


class UploaderProxy:
    """Submits uploads to a process that is started on demand and restarted after a crash.

    For one node's worker pool. All uploads belong to one round at a time. `on_finished` is called
    by the event loop, once for each upload unless it is cancelled, with its result or its error.
    """

    def __init__(
        self,
        storage_url: str,
        key: RunKey,
        start_process: StartSidecarFn,
        on_finished: OnUploadFinishedFn,
    ) -> None:
        self._storage_url = storage_url
        self._key = key
        self._on_finished = on_finished
        self._channel = SidecarChannel(
            start_process,
            decoder=_message_decoder,
            on_message=self._on_message,
            on_exit=self._on_exit,
        )
        self._uploads: dict[int, QueuedUpload] = {}
        """Unfinished uploads by job id, in the order of their submission."""
        self._last_job_id = 0
        self._crashes = 0
        """Crashes of the process since the last finished upload."""

    @property
    def round(self) -> int | None:
        """The number of the round whose uploads are unfinished; None if there are none."""
        return next((upload.round for upload in self._uploads.values()), None)

    def submit(self, upload: QueuedUpload) -> None:
        """Queue an upload; the result is passed to `on_finished`. Does not block.

        The uploads of one rank are executed in order, those of several in parallel.
        """
        self._last_job_id += 1
        self._uploads[self._last_job_id] = upload
        self._send(self._last_job_id, upload)

    def cancel_all(self) -> None:
        """Cancel all uploads and kill the process: a new round may write the same names.

        `on_finished` is not called for them. Does nothing if there are none.
        """
        if self._uploads:
            log.warning("uploader.cancelled", round=self.round, uploads=len(self._uploads))
            self._uploads.clear()
            self.close()

    def close(self) -> None:
        """Kill the process and ignore its exit; `on_finished` is not called for its uploads.

        Called by `cancel_all`, which has removed them.
        """
        self._channel.close()

    def _send(self, job_id: int, upload: QueuedUpload) -> None:
        self._channel.send(
            StartUpload(
                job_id=job_id,
                rank=upload.rank,
                storage_url=self._storage_url,
                secret=self._key.to_text(),
                run_id=self._key.run_id,
                upload_job=upload.request.upload_job,
            )
        )

    def _on_message(self, message: FromUploader) -> None:
        upload = self._uploads.pop(message.job_id, None)
        # None: a duplicate, from a job that was submitted again after a crash.
        if upload is not None:
            self._crashes = 0  # the process makes progress
            self._on_finished(upload, message)

    def _on_exit(self, reason: str) -> None:
        """Submit the unfinished uploads to a new process. Uploads are idempotent."""
        self._channel.forget()  # so that the next message starts another process
        self._crashes += 1
        log.warning(
            "uploader.died", reason=reason, uploads=len(self._uploads), crashes=self._crashes
        )
        if self._crashes < _MAX_CRASHES:
            # A copy: if the new process cannot be started either, this is called again within.
            for job_id, upload in list(self._uploads.items()):
                self._send(job_id, upload)
            return
        failed, self._uploads = self._uploads, {}
        for job_id, upload in failed.items():
            self._on_finished(
                upload, UploadError(job_id=job_id, traceback_text=f"The uploader process {reason}.")
            )
