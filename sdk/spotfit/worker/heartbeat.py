"""Lets the agent detect a hung worker: periodic heartbeats, and stack dumps on a signal."""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path

from spotfit.host import process
from spotfit.protocol.worker_agent import WorkerHeartbeat
from spotfit.worker.agent_connection import AgentConnection


def start_heartbeat(
    connection: AgentConnection, *, interval_s: float, stacks_dir: Path
) -> threading.Thread:
    """Start a daemon thread that sends `WorkerHeartbeat` every `interval_s`, and return it.

    On `process.STACK_DUMP_SIGNAL` the stacks of all threads are appended to
    `<stacks_dir>/<pid>.txt`.
    """
    stacks_dir.mkdir(parents=True, exist_ok=True)
    # Never closed: faulthandler writes to its descriptor until the process exits.
    stacks = (stacks_dir / f"{os.getpid()}.txt").open("ab", buffering=0)
    # faulthandler's C handler runs even while another thread holds the GIL, in which the heartbeat
    # thread is silent and stacks are wanted.
    faulthandler.register(process.STACK_DUMP_SIGNAL, file=stacks, all_threads=True)

    def send_heartbeats() -> None:
        never = threading.Event()
        while not never.wait(interval_s):
            connection.send(WorkerHeartbeat())

    # A daemon: the loop has no end.
    thread = threading.Thread(target=send_heartbeats, name="spotfit-heartbeat", daemon=True)
    thread.start()
    return thread
