"""A worker's connection to one feeder process."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress

from spotfit.data.feeding.messages import (
    FailureReply,
    FeederRequest,
    SliceReply,
    receive_reply,
    send_request,
)
from spotfit.data.loading.slice_tasks import SliceTask


class FeederLink:
    """A connected socket to a feeder process. One thread uses it; any thread may `close` it."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._is_closed = False
        self.name = name
        """For messages, such as "process 123" or "10.0.0.7:4000"."""

    def send(self, number: int, task: SliceTask) -> None:
        """Send a task. Raises `OSError` if the connection is broken."""
        send_request(self._sock, FeederRequest(number=number, task=task))

    def receive(self) -> SliceReply | FailureReply:
        """Wait for the next reply. Raises `OSError` if the connection is broken or closed.

        Raises `IntegrityError` for an invalid frame.
        """
        try:
            reply = receive_reply(self._sock)
        except ValueError as error:  # a TLS socket that another thread has closed
            if not self._is_closed:
                raise
            raise ConnectionResetError("the connection was closed") from error
        if reply is None:
            raise ConnectionResetError("the feeder closed the connection")
        return reply

    def check_idle(self) -> None:
        """Raise `OSError` if the feeder has closed a connection without open requests."""
        with selectors.DefaultSelector() as selector:  # `select` rejects descriptors from 1024 on
            with suppress(ValueError):  # another thread has closed the socket
                selector.register(self._sock, selectors.EVENT_READ)
            # A feeder sends nothing but replies.
            if self._is_closed or selector.select(0):
                raise ConnectionResetError("the feeder closed the connection")

    def close(self) -> None:
        """Close the connection: a `receive` in another thread raises `OSError`."""
        self._is_closed = True
        try:
            # Wakes a thread that is blocked in `recv`, unlike close().
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more
        finally:
            self._sock.close()
