"""Processes of a training that follow each other, within the process of a test."""

from __future__ import annotations

import copy

from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


def begin_next_process() -> None:
    """Let the session be that of a new process, which has the snapshots of the last one.

    A channel is of one process, in which at most one Checkpointer is created. The new one shares
    the state of the last one, also of a save that is still being written.
    """
    session = training_api.require_session("begin_next_process")
    assert isinstance(session, LocalSession)
    last, session.snapshot_channel = session.snapshot_channel, copy.copy(session.snapshot_channel)
    session.snapshot_channel.__dict__ = vars(last)
    # The segments are deleted when the channel that has created their folder is collected.
    vars(last).setdefault("last_processes", []).append(last)
