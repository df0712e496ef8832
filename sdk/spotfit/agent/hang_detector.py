"""`HangDetector`: detects ranks of a round that hang, and stores the stacks of all ranks.

The decision is pure (`policy.failure_detection`); this module collects its inputs and acts on it:

| state      | event                                            | next                         |
|------------|--------------------------------------------------|------------------------------|
| watching   | `detect_hang` names ranks                        | collecting (stacks requested)|
| collecting | all stacks arrived, or `STACK_DUMP_TIMEOUT_S`    | storing                      |
| storing    | stored, failed, or twice `STACK_DUMP_TIMEOUT_S`  | reported                     |
| any        | `detect_hang` returns None                       | watching                     |
| reported   | `detect_hang` names other ranks                  | collecting                   |

Detects workers of this node that have stopped sending messages.

| state        | event                                    | next                          |
|--------------|------------------------------------------|-------------------------------|
| unknown      | first message                            | responsive                    |
| responsive   | no message for more than `timeout_s`     | unresponsive (reported once)  |
| unresponsive | message                                  | responsive (reported once)    |
| any          | process exited                           | unknown                       |

Describes hung workers from outside: the kernel's process state and the stacks of all threads.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.clock import Clock
from spotfit.core.units import format_ranks
from spotfit.host import process
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.spec import HangDetectionConfig
from spotfit.policy import failure_detection
from spotfit.policy.failure_detection import SuspectedHang
from spotfit.protocol.agent_leader import DumpStacks, StackDump

# Workers that respond dump their stacks within a second; waiting longer delays the restart.
STACK_DUMP_TIMEOUT_S = 30.0
"""How long agents may take to collect stacks, and again the bucket to store them."""


class HangReport(NamedTuple):
    """A hang whose stacks were collected."""

    hang: SuspectedHang
    text: str
    """The reason and the location of the stored stacks, for the run's log."""


class HangDetector:
    """Watches one round, on the leader. `request_stacks` sends to every agent of the round."""

    def __init__(
        self,
        coordinator: RoundCoordinator,
        config: HangDetectionConfig,
        *,
        request_stacks: Callable[[DumpStacks], None],
        ledger: Ledger,
        background_calls: BackgroundCalls,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._request_stacks = request_stacks
        self._ledger = ledger
        self._background_calls = background_calls
        self._silent_s: dict[int, float] = {}
        self._suspected_hang: SuspectedHang | None = None
        """The hang whose stacks are being collected or stored."""
        self._dump_id = 0
        self._requested_at = 0.0
        self._stack_texts: dict[int, str] = {}
        self._known_hang: SuspectedHang | None = None
        """The current hang if its stacks were already requested: it is reported only once."""

    def record_liveness(self, rank: int, silent_s: float) -> None:
        """Record a worker (global rank) that sent no heartbeat for `silent_s` seconds.

        0 means that it responds again.
        """
        self._silent_s.pop(rank, None)
        if silent_s:
            self._silent_s[rank] = silent_s

    def add_stack_dump(self, stack_dump: StackDump) -> None:
        """Record the stacks of one worker; ignored for an earlier request (another `dump_id`)."""
        # Stacks of an earlier suspicion would show a state that has passed.
        if stack_dump.dump_id == self._dump_id:
            self._stack_texts[stack_dump.rank] = stack_dump.stack_text

    def next_check(self) -> float:
        """Event-loop time in seconds at which to call `check` again if no event arrives before.

        `math.inf` if nothing is due: the timeout for progress is disabled, or the hang was
        reported.
        """
        if self._suspected_hang is not None:
            return self._requested_at + STACK_DUMP_TIMEOUT_S
        if self._known_hang is not None:
            return math.inf
        return failure_detection.next_hang_check_at(self._config, self._coordinator.progress)

    def check(self, now: float) -> HangReport | None:
        """Advance the detection; called at each tick. Returns the report of a hang once, else None.

        A suspected hang starts a request for stacks, then a background write to the bucket; the
        report follows after at most twice `STACK_DUMP_TIMEOUT_S`, also if stacks are missing or the
        write fails. Ranks that make progress meanwhile end the suspicion.
        """
        suspected = failure_detection.detect_hang(
            self._config, self._silent_s, self._coordinator.progress, now
        )
        if suspected is None:
            # The ranks made progress while the stacks were collected: nothing is reported.
            self._known_hang = self._suspected_hang = None
        elif self._suspected_hang is None and (
            self._known_hang is None or self._known_hang.ranks != suspected.ranks
        ):
            self._suspected_hang = self._known_hang = suspected
            self._requested_at = now
            self._dump_id += 1
            self._stack_texts = {}
            self._request_stacks(DumpStacks(round=self._coordinator.round, dump_id=self._dump_id))
        if self._suspected_hang is None:
            return None
        # A node that is frozen or lost never answers; the report then lacks its stacks.
        is_complete = len(self._stack_texts) == self._coordinator.world_size
        if not is_complete and now < self._requested_at + STACK_DUMP_TIMEOUT_S:
            return None
        return self._store_stack_dump(self._suspected_hang, now)

    def _store_stack_dump(self, suspected_hang: SuspectedHang, now: float) -> HangReport | None:
        """Return None while the write is in progress.

        If the write fails or times out, the report says so: a hang must not stay undetected because
        the bucket is unavailable.
        """
        key = keys.stack_dump(self._ledger.agent_id, self._coordinator.round, self._dump_id)
        missing = f"its node did not send them within {STACK_DUMP_TIMEOUT_S:.0f} s"
        # The suspected ranks first: at 1,000 ranks a reader needs these first.
        ranks = dict.fromkeys([*suspected_hang.ranks, *range(self._coordinator.world_size)])
        parts = [f"=== rank {rank}: {self._stack_texts.get(rank, missing)}\n" for rank in ranks]
        body = "\n".join([f"{suspected_hang.reason}\n", *parts])
        store = self._ledger.store
        write = partial(store.put, key, body.encode())
        result = self._background_calls.run(f"stacks {key}", write)
        # A write that is in progress twice as long as allowed is not waited for.
        if result is None and now < self._requested_at + 2 * STACK_DUMP_TIMEOUT_S:
            return None
        self._suspected_hang = None
        location = f"the stacks of all ranks are in {store.url.rstrip('/')}/{key}"
        if result is None or result.error is not None:
            reason = "the bucket does not answer" if result is None else result.error
            location = f"their stacks could not be stored: {reason}"
        waits = describe_waits({rank: self._stack_texts.get(rank, "") for rank in ranks})
        return HangReport(suspected_hang, "; ".join([suspected_hang.reason, *waits, location]))


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_WORKER_MAIN = "/spotfit/worker/main.py"
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3.", "<frozen ")
# Ranks usually wait at one or two places; the file has the others.
_MAX_WAITS = 4


def describe_waits(stack_texts: Mapping[int, str]) -> list[str]:
    """Return where ranks are in the user's code, such as "ranks 0, 2 at /x/train.py:8 in train".

    `stack_texts` are results of `dump_stacks`, by rank. Ranks without a frame of the user's code
    are left out. At most four places, in the order of the ranks.
    """
    ranks_by_place: dict[str, list[int]] = {}
    for rank, text in stack_texts.items():
        if place := _user_frame(text):
            ranks_by_place.setdefault(place, []).append(rank)
    places = [f"{format_ranks(ranks)} at {place}" for place, ranks in ranks_by_place.items()]
    return places[:_MAX_WAITS]


def _user_frame(stack_text: str) -> str:
    """Return the innermost frame of user code in the thread that called the training function."""
    for thread in re.split(r"^(?=Thread |Current thread )", stack_text, flags=re.MULTILINE):
        frames: list[tuple[str, str, str]] = _FRAME.findall(thread)  # innermost first
        mains = [file for file, _, _ in frames if file.endswith(_WORKER_MAIN)]
        if not mains:
            continue
        own_prefix = mains[0].removesuffix("worker/main.py")
        for file, line, function in frames:
            if not file.startswith(own_prefix) and not any(part in file for part in _LIBRARIES):
                return f"{file}:{line} in {function}"
    return ""


# --- Detects workers of this node that have stopped sending messages ------------------------------


# One or two heartbeats may be late on a busy node without a false alarm.
_HEARTBEATS_PER_TIMEOUT = 4
_MAX_HEARTBEAT_INTERVAL_S = 5.0


def heartbeat_interval_s(timeout_s: float) -> float:
    """Return the seconds between a worker's heartbeats: a quarter of `timeout_s`, at most 5.

    0 (no heartbeats) if `timeout_s` is 0, which disables the worker timeout.
    """
    return min(_MAX_HEARTBEAT_INTERVAL_S, timeout_s / _HEARTBEATS_PER_TIMEOUT)


class WorkerLiveness:
    """Counts for how long each worker of this node has been silent, from its first message on.

    For the node's agent. Ranks are global, of the round that runs.
    """

    def __init__(self, timeout_s: float) -> None:
        self.check_interval_s = heartbeat_interval_s(timeout_s)
        self._timeout_s = timeout_s
        self._silent_s: dict[int, float] = {}
        self._unresponsive: set[int] = set()
        self._last_check_at: float | None = None

    def record_heartbeat(self, rank: int) -> bool:
        """Record a message of any kind from a worker, which is responsive from now on.

        Returns True if it was unresponsive before, so that the recovery must be reported.
        """
        was_unresponsive = rank in self._unresponsive
        self._unresponsive.discard(rank)
        self._silent_s[rank] = 0.0
        return was_unresponsive

    def remove(self, rank: int) -> None:
        """Remove a worker that has exited; harmless if it is unknown."""
        self._silent_s.pop(rank, None)
        self._unresponsive.discard(rank)

    def find_unresponsive(self, now: float) -> dict[int, float]:
        """Return the workers that have become unresponsive: seconds of silence by rank.

        Call it every `check_interval_s` with the event-loop time `now` in seconds. Each worker is
        returned once per silence. A late check adds at most twice the interval to the silence.
        """
        previous_at = now if self._last_check_at is None else self._last_check_at
        # A node that swaps or was suspended delays this process as much as its workers: a late
        # check counts no more than twice the interval (docs/decisions/0022).
        elapsed_s = min(now - previous_at, 2 * self.check_interval_s)
        self._last_check_at = now
        for rank in self._silent_s:
            self._silent_s[rank] += elapsed_s
        newly_unresponsive = {
            rank: silent_s
            for rank, silent_s in self._silent_s.items()
            if silent_s > self._timeout_s and rank not in self._unresponsive
        }
        self._unresponsive |= newly_unresponsive.keys()
        return newly_unresponsive


# --- Describes hung workers from outside ----------------------------------------------------------


# A process in uninterruptible sleep does not answer; the leader waits 30 s for all nodes.
DUMP_TIMEOUT_S = 5.0
MAX_DUMP_BYTES = 256 * 1024
_POLL_S = 0.05
_PY_SPY_TIMEOUT_S = 10.0  # it reads the symbols of torch's libraries first


def stacks_dir(scratch: str | Path) -> Path:
    """Return the directory in which workers write their stacks on a signal, one file per pid.

    It is below the agent's scratch directory, and created by the workers
    (`worker.agent_connection`).
    """
    return Path(scratch) / "stacks"


def dump_stacks(pids: Mapping[int, int], directory: Path, clock: Clock) -> dict[int, str]:
    """Return a text for each process of `pids` (rank to pid), by rank: kernel state and all stacks.

    Blocks for `DUMP_TIMEOUT_S` if a process does not answer, and up to 10 s per process for py-spy:
    call it in a thread. `directory` is `stacks_dir`. Never fails for a process that has exited or
    does not answer: the text says so.

    The workers write their Python stacks on a signal, even while a thread holds the GIL. If py-spy
    is installed and permitted to attach, it adds native frames.
    """
    files = {rank: directory / f"{pid}.txt" for rank, pid in pids.items()}
    before = {rank: _size(file) for rank, file in files.items()}
    # Read before the signal, which would end a wait in the kernel.
    states = {rank: process.describe_state(pid) for rank, pid in pids.items()}
    for rank, pid in pids.items():
        # Without the file the worker has not registered its handler, and the signal would kill it.
        if files[rank].exists():
            process.kill(pid, process.STACK_DUMP_SIGNAL)
    # Until all files have grown and stopped growing: the handler writes a stack in several calls.
    deadline = clock.now() + DUMP_TIMEOUT_S
    sizes: dict[int, int] = {}
    while clock.now() < deadline:
        clock.wait(_POLL_S)
        previous, sizes = sizes, {rank: _size(file) for rank, file in files.items()}
        if sizes == previous and all(sizes[rank] > before[rank] for rank in sizes):
            break
    dumps = {}
    for rank, pid in pids.items():
        state = f"process {pid}, kernel state: {states[rank] or 'no such process'}"
        stacks = (
            "No Python stacks: the process is stopped, blocked in the kernel, or still starting."
        )
        if _size(files[rank]) > before[rank]:
            with files[rank].open("rb") as file:
                file.seek(before[rank])  # the file still has the stacks of earlier dumps
                stacks = file.read(MAX_DUMP_BYTES).decode(errors="replace").rstrip()
        dumps[rank] = f"{state}\n{stacks}\n{_run_py_spy(pid)}"
    return dumps


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _run_py_spy(pid: int) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return ""
    try:
        completed = subprocess.run(  # noqa: S603 - a local program with a pid as argument
            [py_spy, "dump", "--native", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PY_SPY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed: {error}"
    # It fails without ptrace permission, as in most containers: its message says so.
    output = completed.stdout if completed.returncode == 0 else completed.stderr
    return f"py-spy dump --native:\n{output[:MAX_DUMP_BYTES].decode(errors='replace').rstrip()}"
