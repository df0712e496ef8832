"""One rank's files of a report on their way into the run's folder, by whoever brings them."""

from __future__ import annotations

import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.save import save
from spotfit.core.errors import TransientStoreError
from spotfit.host import env, log
from spotfit.host.clocks import SystemClock
from spotfit.store.api import Store
from spotfit.worker.reported import UploadFn

_PAUSES_S = (0.5, 2.0)
_PASSING = re.compile(
    "AWS Error (SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|NETWORK_CONNECTION|UNKNOWN)"
)
"""Words of pyarrow, with which most upload functions write."""


class Parcel(NamedTuple):
    """What is to be brought, and how. Pickled, it means the same on this machine."""

    checkpoint: Checkpoint
    part: Manifest
    """Which report and which rank; its files are not known yet."""
    base: str = ""
    """The checkpoint that had the name before: what the rank brought to it, and does not bring
    anew, belongs to this one, too."""
    delete: bool = False
    """Whether the local copy goes once it is there."""

    def packed(self) -> bytes:
        """For the process that brings it, which knows none of the user's classes."""
        return pickle.dumps(self._replace(checkpoint=self.checkpoint.bare()))


def unpacked(body: bytes) -> Parcel:
    """What a worker of the same machine has packed."""
    parcel = pickle.loads(body)  # noqa: S301 - it came from our own worker, over its own socket
    assert isinstance(parcel, Parcel)
    return parcel


def bring(parcel: Parcel, store: Store) -> Manifest:
    """Upload the files, then write the manifest, to the run at `store`; may be called again."""
    with told_while_slow(parcel.part.name), parcel.checkpoint.as_directory() as directory:
        return save(store, Path(directory), parcel.part, base=parcel.base)


def uploaded_by(upload: UploadFn, checkpoint: Checkpoint, name: str) -> Any:
    """What the user's function gives; called again, at most twice, where S3 failed in passing."""
    with told_while_slow(name):
        for pause_s in _PAUSES_S:
            try:
                return upload(checkpoint, name)
            except Exception as error:  # the border to the user's upload function
                if not _passes(error):
                    raise
                log.warning("checkpoint.upload_again", name=name, why=str(error))
            SystemClock().wait(pause_s)
        return upload(checkpoint, name)


def _passes(error: Exception) -> bool:
    return isinstance(error, TransientStoreError) or bool(_PASSING.search(str(error)))


def delete_local(checkpoint: Checkpoint, store: Store) -> None:
    """Remove the copy that was uploaded, unless it lies in the run: what is there may be an
    earlier checkpoint, or what other ranks are still to upload."""
    local = checkpoint.local_directory
    if local is not None and checkpoint.folder_below(store) is None:
        shutil.rmtree(local, ignore_errors=True)


@contextmanager
def told_while_slow(name: str) -> Iterator[None]:
    """Warn, now and then, that the upload of that checkpoint still takes its time."""
    every_s = env.value(env.UPLOAD_WARN_S)
    over = threading.Event()

    def tell() -> None:
        so_far_s = 0.0
        while not over.wait(every_s):
            so_far_s += every_s
            log.warning("checkpoint.upload_slow", name=name, so_far_s=so_far_s)

    teller = threading.Thread(target=tell, name="spotfit-upload-watch", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
