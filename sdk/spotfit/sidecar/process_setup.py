"""What the programs of the sidecar processes share: the agent connection, and loading user code."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from spotfit.code import function_pickle
from spotfit.code.code_bundle import CodeBundlePayload
from spotfit.core.codec import encode
from spotfit.core.errors import StoreError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.protocol import framing
from spotfit.protocol.agent_sidecar import SidecarInit
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.retry import RetryPolicy
from spotfit.worker.code_setup import activate_code_bundle

MessageT = TypeVar("MessageT")


class SidecarConnection(Generic[MessageT]):
    """A sidecar's end of the socket to its agent. Any thread may send; one thread receives."""

    def __init__(self, socket_fd: int, decoder: msgspec.json.Decoder[MessageT]) -> None:
        self._socket = socket.socket(fileno=socket_fd)
        self._decoder = decoder
        self._write_lock = threading.Lock()

    def receive(self) -> MessageT | None:
        """Wait for the next message; return None once the agent has closed the socket.

        Blocks without a timeout. Raises `msgspec.DecodeError` for an invalid message.
        """
        body = framing.read_frame(self._socket)
        return None if body is None else self._decoder.decode(body)

    def send(self, message: Any) -> None:
        """Send a message to the agent, from any thread. Raises `OSError` if the agent is gone.

        Blocks while the socket's buffer is full.
        """
        # The uploads of several ranks end in threads of their own: frames must not interleave.
        with self._write_lock:
            framing.write_frame(self._socket, encode(message))


class SidecarRun:
    """The run of a callbacks or hooks process: its store, its key and the user's code."""

    def __init__(self, init: SidecarInit, retry_policy: RetryPolicy | None = None) -> None:
        self._init = init
        self.key = RunKey.from_text(init.secret, init.run_id)
        self.store: Store = AuthenticatedStore(open_store(init.storage_url, retry_policy), self.key)

    def load_code(self) -> CodeBundlePayload:
        """Make the user's code importable in this process, and return its code bundle.

        Blocks for downloads and pip. Also sets the environment variables of the user's runtime
        environment. Raises `ShippingError`, `IntegrityError` and those of the store and of pip, see
        `activate_code_bundle`.
        """
        # Not in `__init__`: its errors are reported by the first call, not as a dead process.
        init = self._init
        return activate_code_bundle(
            init.code_bundle, key=self.key, store=self.store, scratch=init.scratch_dir
        )


def store_exception(error: BaseException, store: Store, key: RunKey) -> str | None:
    """Store an exception of user code, pickled and sealed, for the caller of `fit()`.

    `store` is the root of the run. Returns the object key, `".spotfit/failures/hook-<sha256>.pkl"`,
    or None if the exception cannot be pickled or stored. Blocks for the write.
    """
    body = function_pickle.pickle_exception(error)
    if not body:
        return None
    # Named by content: a failure that repeats is stored once.
    name = keys.hook_failure(hashlib.sha256(body).hexdigest())
    # Without the object the caller gets the traceback as text: no reason to fail the reply.
    try:
        store.put(name, key.seal(body, purpose=name))
    except StoreError as failure:
        log.warning("failure.store_failed", key=name, reason=failure.message)
        return None
    return name


def exit_sidecar() -> NoReturn:
    """End this process with code 0, without exit handlers and without waiting for threads.

    Called when the agent is gone: user code may have threads that hang.
    """
    sys.stdout.flush()  # an incomplete last line; complete ones are flushed at once
    os._exit(0)
