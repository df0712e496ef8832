"""The process that uploads what workers gave away: it outlives them, and answers to their agent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import NoReturn

from spotfit.checkpoint.bring import Brought as BroughtBefore
from spotfit.checkpoint.bring import bring_snapshot
from spotfit.checkpoint.bring import unpacked as unpacked_snapshot
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import decoder, encode
from spotfit.host import frames, process
from spotfit.model.carrier import Brought, FromCarrier, Lost, Take
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT
from spotfit.store.opening import open_store
from spotfit.worker import crash
from spotfit.worker.parcel import bring, delete_local, told_while_slow, unpacked
from spotfit.worker.uploads import Uploads

Say = Callable[[FromCarrier], None]
_takes = decoder(Take)
_known = BroughtBefore()


def main(descriptor: int) -> NoReturn:
    """Serve the agent at the other end of that socket until it closes it. Ends the process."""
    process.call_myself("spotfit-carrier")
    wire = socket.socket(fileno=descriptor)
    carrier = Carrier(partial(_say, wire, threading.Lock()))
    while (body := frames.read(wire)) is not None:
        carrier.take(_takes.decode(body))
    os._exit(0)  # whatever is still on its way: nobody waits for it any more


def _say(wire: socket.socket, writing: threading.Lock, message: FromCarrier) -> None:
    with writing:
        frames.write(wire, encode(message))


class Carrier:
    """A lane a rank: parcels of one rank go one after the other, those of several side by side."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lanes: dict[int, Uploads] = {}

    def take(self, order: Take) -> None:
        """Upload it when its turn comes, and say how it went."""
        lane = self._lanes.setdefault(order.rank, Uploads(_never))
        lane.put(partial(self._deliver, order))

    def _deliver(self, order: Take) -> None:
        """One that fails does not stop those behind it: each is a checkpoint of its own."""
        try:
            manifest = _brought(order.parcel, _store(order.storage_url))
        except BaseException as error:  # noqa: BLE001 - a failing upload is the worker's to raise
            raised = crash.as_raised(error)
            self._say(Lost(order.serial, raised.told, raised.value))
        else:
            self._say(Brought(order.serial, manifest.size_bytes, manifest.step))


def _brought(body: bytes, store: Store) -> Manifest:
    if (snapshot := unpacked_snapshot(body)) is not None:
        with told_while_slow(snapshot.part.name):
            return bring_snapshot(store, snapshot, _known)
    parcel = unpacked(body)
    manifest = bring(parcel, store)
    if parcel.delete:
        delete_local(parcel.checkpoint, store)
    return manifest


@cache
def _store(url: str) -> Store:
    """As patient as a worker's own: who must not wait for it ends this process."""
    return open_store(url, PATIENT)


def _never(error: BaseException) -> None:
    raise AssertionError("a delivery tells of its own failure") from error
