"""Simulated machines for feeders: connections of workers to them, and the slices they return.

States of a connection: open -> broken. It breaks when the worker closes it, when its worker or its
feeder ends, and when a machine is lost that closes its connections. Without that the worker gets no
further replies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from spotfit.model.spec import RunSpec
from spotfit.model.topology import FeederAddress
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.virtual.engine import Engine
from spotfit_localsim.virtual.sim_threads import SimThreading, WaitQueue
from spotfit_localsim.virtual.workload import FeederFaults

if TYPE_CHECKING:
    from spotfit.data.feeding.messages import FailureReply, SliceReply
    from spotfit.data.loading.slice_tasks import SliceTask

_BLOCKED_RETRY_S = 0.5
"""Interval at which a message is sent again while the network blocks it."""


class SimFeederNode:
    """The feeders of one agent. They accept connections at once."""

    def __init__(self, host: str, nodes: dict[str, SimFeederNode]) -> None:
        """`nodes` are all running ones, by address."""
        self._host = host
        self._nodes = nodes
        self.connections: list[SimFeederConnection] = []

    @property
    def is_running(self) -> bool:
        return self._nodes.get(self._host) is self

    def start(self, spec: RunSpec) -> None:
        self._nodes[self._host] = self

    def stop(self) -> None:
        self.close(closes_connections=True)

    def close(self, *, closes_connections: bool) -> None:
        """End the feeders; without `closes_connections` the workers are not notified."""
        if not self.is_running:
            return
        del self._nodes[self._host]
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.end(notifies=closes_connections)

    @property
    def feeder(self) -> FeederAddress | None:
        return FeederAddress(address=self._host) if self.is_running else None


class SimFeederConnection:
    """A connection of one worker to one feeder, which executes tasks one after the other."""

    def __init__(
        self,
        engine: Engine,
        threads: SimThreading,
        is_connected: Callable[[], bool],
        read: Callable[[int, SliceTask], SliceReply | FailureReply],
        *,
        stream: RandomStream,
        faults: FeederFaults,
    ) -> None:
        """`read` executes a task in the feeder; `is_connected`: whether messages pass."""
        self._engine = engine
        self._is_connected = is_connected
        self._read = read
        self._stream = stream
        self._faults = faults
        self._tasks: deque[tuple[int, SliceTask]] = deque()
        self._replies: deque[SliceReply | FailureReply] = deque()
        self._changed = WaitQueue(threads)
        self._has_feeder = True
        self.is_broken = False

    def send(self, number: int, task: SliceTask) -> None:
        """Send a task. Raises `OSError` if the connection is broken."""
        self.check()
        self._tasks.append((number, task))
        if len(self._tasks) == 1:
            self._execute_next()

    def receive(self) -> SliceReply | FailureReply:
        """Wait for the next reply. Raises `OSError` if the connection is broken."""
        while not self._replies:
            self.check()
            self._changed.wait()
        return self._replies.popleft()

    def check(self) -> None:
        """Raise `OSError` if the connection is broken."""
        if self.is_broken:
            raise ConnectionResetError("the connection was closed")

    def close(self) -> None:
        """The worker closes the connection, or ends."""
        self._has_feeder = False
        self._break()

    def end(self, *, notifies: bool) -> None:
        """The feeder ends; without `notifies` the worker only gets no further replies."""
        self._has_feeder = False
        if notifies:
            self._break()

    def _break(self) -> None:
        self.is_broken = True
        self._changed.notify_all()

    def _execute_next(self) -> None:
        # A feeder that hangs returns nothing any more, and its connection stays open.
        if not self._stream.bernoulli(self._faults.hang_probability):
            self._engine.schedule_after(self._stream.uniform_in(self._faults.slice_s), self._finish)

    def _finish(self) -> None:
        if not self._has_feeder:
            return
        number, task = self._tasks.popleft()
        self._deliver(self._read(number, task))
        if self._tasks:
            self._execute_next()

    def _deliver(self, reply: SliceReply | FailureReply) -> None:
        if not self._has_feeder:
            return
        # TCP repeats what the network drops.
        if not self._is_connected():
            self._engine.schedule_after(_BLOCKED_RETRY_S, lambda: self._deliver(reply))
            return
        self._replies.append(reply)
        self._changed.notify_all()
