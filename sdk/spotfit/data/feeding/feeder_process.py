"""The program of a feeder process: executes the tasks of its connections, one at a time.

The parent process passes connections through a control socket: one end of a socket pair for a
process beside a worker, accepted TCP connections on a machine for feeders.

| event                           | reaction                                      |
|---------------------------------|-----------------------------------------------|
| a connection is passed          | TLS handshake, if it needs one, in a thread   |
| a request arrives               | queued; its windows are read in other threads |
| requests are queued             | the next connection's first one is executed   |
| a connection breaks             | its requests are dropped                      |
| the control socket is closed    | the process exits                             |
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import socket
import ssl
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from spotfit.code.function_pickle import unpickle
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import RunId
from spotfit.data.caching.cache_directories import set_scratch_directory
from spotfit.data.feeding.messages import (
    FeederRequest,
    receive_bytes,
    receive_request,
    send_failure,
    send_slice,
)
from spotfit.data.loading.slices import SliceReader
from spotfit.host import log
from spotfit.host.process import set_process_name
from spotfit.security.run_key import make_tls_contexts

# A worker that does not read for this time is lost: its machine ended without closing the
# connection.
_SOCKET_TIMEOUT_S = 60.0
_HANDSHAKE_TIMEOUT_S = 10.0
PLAIN, TLS = b"p", b"t"
"""What a connection is passed with: whether the process is to make a TLS handshake on it."""


class FeederInit(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame on the control socket; the pickled datasets follow as the second one."""

    log_level: str = "INFO"
    secret: str = ""
    """The run key as text; '' for a process that gets no connections of other machines."""
    run_id: RunId = RunId("")
    scratch_dir: str = ""
    """The scratch directory of the run on this machine; '' if it has none."""

    def __repr__(self) -> str:
        return "FeederInit(…)"


def main(control_fd: int) -> NoReturn:
    """Execute tasks until the parent closes the other end of the control socket, then exit.

    The first frames are a `FeederInit` and a pickle of an object with the attribute `datasets`.
    """
    faulthandler.enable()
    set_process_name("spotfit-feeder")
    control = socket.socket(fileno=control_fd)
    first, pickled = receive_bytes(control), receive_bytes(control)
    if first is None or pickled is None:
        os._exit(1)  # the parent is gone
    init = decoder(FeederInit).decode(first)
    log.use_default_handler()
    log.set_level(init.log_level)
    if init.scratch_dir:
        set_scratch_directory(init.scratch_dir)
    # The datasets are unpickled with the first task: an error of it is the reply.
    loop = FeederLoop(control, lambda: _open_reader(pickled), _open_tls(init))
    loop.run()
    # Without exit handlers and threads of user code, which may hang.
    os._exit(0)


def _open_reader(pickled: bytes) -> SliceReader:
    shipped: Any = unpickle(pickled, description="datasets")
    return SliceReader(shipped.datasets)


def _open_tls(init: FeederInit) -> ssl.SSLContext | None:
    return make_tls_contexts(init.secret, init.run_id).server if init.secret else None


class _Connection:
    """A connection of a worker, with its requests that were not executed yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.requests: deque[FeederRequest] = deque()

    @property
    def has_buffered_bytes(self) -> bool:
        """Whether TLS has decrypted more than was read: no event of the socket reports it."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0


class FeederLoop:
    """The event loop of a feeder process. User code runs in the thread that calls `run`."""

    def __init__(
        self,
        control: socket.socket,
        open_reader: Callable[[], SliceReader],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._control = control
        self._open_reader = open_reader
        self._reader: SliceReader | None = None
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[_Connection] = deque()
        """The connections with requests; the first one is served next."""
        self._established: deque[socket.socket] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def run(self) -> None:
        """Execute tasks until the control socket is closed; then close all sockets."""
        while self._receive_events():
            if self._waiting:
                connection = self._waiting.popleft()
                self._execute(connection, connection.requests.popleft())
                if connection.requests:
                    self._waiting.append(connection)
        sockets = [key.fileobj for key in self._selector.get_map().values()]
        for sock in (*sockets, self._wake_sender):
            assert isinstance(sock, socket.socket)
            sock.close()
        self._selector.close()
        if self._reader is not None:
            self._reader.close()

    def _receive_events(self) -> bool:
        """Process what has arrived; wait for it if there is no request. False at the end."""
        for key, _ in self._selector.select(0 if self._waiting else None):
            if key.fileobj is self._control:
                if not self._accept():
                    return False
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(1)
                self._add(self._established.popleft())
            else:
                self._receive_requests(key.data)
        return True

    def _accept(self) -> bool:
        kind, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not kind:
            return False
        sock = socket.socket(fileno=descriptors[0])
        if kind == TLS:
            # In a thread: a port scanner that sends nothing must not stop the tasks of others.
            threading.Thread(target=self._shake_hands, args=[sock], daemon=True).start()
        else:
            self._add(sock)
        return True

    def _shake_hands(self, sock: socket.socket) -> None:
        assert self._tls is not None, "connections of other machines need the run key"
        try:
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            established = self._tls.wrap_socket(sock, server_side=True)
        except OSError as error:
            sock.close()
            log.debug("feeder.connection_rejected", reason=str(error))
            return
        self._established.append(established)
        self._wake_sender.send(b"\0")

    def _add(self, sock: socket.socket) -> None:
        sock.settimeout(_SOCKET_TIMEOUT_S)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _receive_requests(self, connection: _Connection) -> None:
        try:
            while True:
                request = receive_request(connection.sock)
                if request is None:
                    self._close(connection, "the worker closed it")
                    return
                connection.requests.append(request)
                if len(connection.requests) == 1:
                    self._waiting.append(connection)
                if self._reader is not None:
                    self._prefetch(request)
                if not connection.has_buffered_bytes:
                    return
        except (OSError, IntegrityError) as error:
            self._close(connection, str(error))

    def _prefetch(self, request: FeederRequest) -> None:
        assert self._reader is not None
        try:
            self._reader.prefetch(request.task)
        except Exception as error:  # noqa: BLE001 - the execution of the task raises it again
            log.debug("feeder.prefetch_failed", reason=str(error))

    def _execute(self, connection: _Connection, request: FeederRequest) -> None:
        try:
            if self._reader is None:
                self._reader = self._open_reader()
            table = self._reader.read(request.task)
        except BaseException:  # noqa: BLE001 - user code may raise anything; it is the reply
            self._reply(connection, send_failure, request.number, traceback.format_exc())
        else:
            self._reply(connection, send_slice, request.number, table)

    def _reply(
        self, connection: _Connection, send: Callable[..., None], number: int, content: Any
    ) -> None:
        try:
            send(connection.sock, number, content)
        except (OSError, IntegrityError) as error:
            self._close(connection, str(error))

    def _close(self, connection: _Connection, reason: str) -> None:
        log.debug("feeder.connection_closed", reason=reason)
        connection.requests.clear()
        if connection in self._waiting:
            self._waiting.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
