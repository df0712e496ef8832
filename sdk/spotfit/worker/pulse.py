"""Signs of life: a word now and then for the agent, and the stacks of all threads on a signal."""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path

from spotfit.host import process
from spotfit.model.wire import Alive
from spotfit.worker.talk import Talk


def begin(talk: Talk, *, every_s: float, folder: Path) -> threading.Thread:
    """From now on say `Alive` every so many seconds, from a thread of its own.

    Whoever sends the signal finds the stacks of this process in `folder`, under its number: they
    are written even while another thread holds Python's lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stacks = (folder / f"{os.getpid()}.txt").open("ab", buffering=0)  # as long as we live
    faulthandler.register(process.STACKS_SIGNAL, file=stacks, all_threads=True)
    thread = threading.Thread(target=_beat, args=(talk, every_s), name="spotfit-pulse", daemon=True)
    thread.start()
    return thread


def _beat(talk: Talk, every_s: float) -> None:
    never = threading.Event()
    while not never.wait(every_s):
        talk.send(Alive())
