"""The state directory of a local cloud, shared by all processes that submit or serve nodes.

<root>/lock                       lock file; one submitter at a time
<root>/capacity                   capacity override, valid while the process that wrote it runs
<root>/machines/<pid>-<started>/  a machine: its socket and temporary files
<root>/<run>/<token>/node-<k>/    a node of a group, from submit to its end or to cancel
    assignment                    agent environment and entry point; deleted when read
    machine                       identity of the machine; created atomically by the first one
    notice                        the preemption notice
    reclaimed                     reason of a preemption
    ended                         reason of an agent failure
    stopped                       exists since the machine was first observed to have ended
    output                        output of the agent
    scratch                       scratch directory of agent and workers
<root>/<run>/.<token>             a group that is being created or removed

State of a node:

    files                                        | state
    ---------------------------------------------|---------
    no directory                                 | GONE
    `ended`                                      | FAILED
    `machine`, whose process runs                | RUNNING
    `machine`, whose process has ended           | GONE
    `assignment` of the last `START_TIMEOUT_S`   | WAITING
    an older `assignment`, or neither            | GONE
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spotfit.core.errors import ProvisionPermissionError
from spotfit.core.ids import RunId, Token
from spotfit.host import system
from spotfit.host.owned_dirs import remove_orphaned_shared_memory
from spotfit.model.group import NodeState, NodeStatus
from spotfit_provisioners.local.processes import ProcessIdentity, current_process

_PRIVATE = 0o700
_MACHINES = "machines"
START_TIMEOUT_S = 20.0
"""A node without a machine for this time is lost: its submitter was killed before it started one.

The submitter records the machine directly after the start, which takes milliseconds."""


@dataclass(frozen=True, slots=True)
class LocalCloudDir:
    """The directory of one local cloud, readable by its user only."""

    path: Path

    @classmethod
    def default(cls) -> LocalCloudDir:
        """Return the directory of this user below the temporary directory."""
        return cls(Path(tempfile.gettempdir()) / f"spotfit-{os.getuid()}")

    def ensure(self) -> LocalCloudDir:
        """Create the directory. Raises `ProvisionPermissionError` if other users can enter it."""
        self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        # lstat: in a world-writable directory another user may have placed a link of this name.
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ProvisionPermissionError(
                f"The state directory {self.path} is not a directory of this user with mode 700: "
                "other users could read the run keys in it.",
                do=f"Run `chmod 700 {self.path}`, remove it, or set LocalOptions(root=…) to "
                "another directory.",
            )
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive lock of the directory; the kernel releases it if the process ends."""
        descriptor = self._acquire_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _acquire_lock(self) -> int:
        while True:
            # Another process may collect the directory between `ensure` and `open`, or while this
            # one waits for the lock; then the lock file is a deleted one, and the loop repeats.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(self.ensure().path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_same_file(descriptor, self.path / "lock"):
                    return descriptor
                os.close(descriptor)

    def collect_garbage(self) -> None:
        """Remove directories of ended machines, and the root itself if it is unused."""
        if not self.path.exists():
            return
        # Locked: a submitter creates directories only under the lock.
        with self.lock():
            for process in self.machines():
                if not process.is_alive:
                    self.remove_machine(process)
            if self.capacity() is None:
                (self.path / "capacity").unlink(missing_ok=True)
            for run in self._run_dirs():
                # Groups whose creation or removal was interrupted; both need the lock.
                for folder in _subdirectories(run, hidden=True):
                    shutil.rmtree(folder, ignore_errors=True)
            for folder in (self.path / _MACHINES, *self._run_dirs()):
                _remove_if_empty(folder)
            if [entry.name for entry in self.path.iterdir()] == ["lock"]:
                (self.path / "lock").unlink()
                _remove_if_empty(self.path)

    # --- machines -----------------------------------------------------------------------------

    def machines(self) -> list[ProcessIdentity]:
        """Return all machines that have a directory, including ended ones."""
        homes = _subdirectories(self.path / _MACHINES)
        return [
            process for home in homes if (process := ProcessIdentity.parse(home.name)) is not None
        ]

    def machine_dir(self, process: ProcessIdentity) -> Path:
        """Return the directory of the machine's socket and temporary files."""
        return self.path / _MACHINES / str(process)

    def remove_machine(self, process: ProcessIdentity) -> None:
        """Remove the directory of an ended machine, and the snapshots of a killed agent."""
        home = self.machine_dir(process)
        if not home.exists():
            return
        shutil.rmtree(home, ignore_errors=True)
        # Its agent may have been killed; without a next agent on this computer nothing frees them.
        remove_orphaned_shared_memory()

    # --- groups -------------------------------------------------------------------------------

    def group(self, run: RunId, token: Token) -> LocalGroup:
        return LocalGroup(self, self.path / run / token)

    def groups(self) -> Iterator[LocalGroup]:
        """Yield all groups."""
        for run in self._run_dirs():
            for folder in _subdirectories(run):
                yield LocalGroup(self, folder)

    def _run_dirs(self) -> list[Path]:
        known = {"lock", "capacity", _MACHINES}
        return [entry for entry in _subdirectories(self.path) if entry.name not in known]

    # --- capacity -----------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """Return the capacity set by a process that still runs, or None."""
        nodes, _, owner = (_read_text(self.path / "capacity") or "").partition(" ")
        process = ProcessIdentity.parse(owner)
        return int(nodes) if process is not None and process.is_alive else None

    def set_capacity(self, nodes: int | None) -> None:
        """Override the capacity while this process runs; None removes the override."""
        if nodes is None:
            (self.path / "capacity").unlink(missing_ok=True)
            self.collect_garbage()
            return
        with self.lock():
            _write_atomically(self.path / "capacity", f"{nodes} {current_process()}")


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The nodes of one token. The directory is created atomically by a rename."""

    root: LocalCloudDir
    path: Path

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def run_id(self) -> RunId:
        return RunId(self.path.parent.name)

    @property
    def token(self) -> Token:
        return Token(self.path.name)

    def create(self, assignments: list[Mapping[str, Any]]) -> None:
        """Create a node for each assignment. The caller must hold the lock of the root."""
        # Written beside and renamed, so that other processes see all nodes or none. A draft of an
        # interrupted submission is replaced.
        draft = _hidden(self.path)
        shutil.rmtree(draft, ignore_errors=True)
        for number, assignment in enumerate(assignments):
            node = LocalNode(self.root, draft / f"node-{number}")
            node.path.mkdir(mode=_PRIVATE, parents=True)
            _write_atomically(node.path / "assignment", json.dumps(assignment))
        draft.rename(self.path)

    def node(self, number: int) -> LocalNode:
        return LocalNode(self.root, self.path / f"node-{number}")

    def nodes(self) -> list[LocalNode]:
        """Return the nodes that have not ended successfully."""
        return [LocalNode(self.root, entry) for entry in _subdirectories(self.path)]

    def remove(self) -> None:
        """Remove the directory of the group. The caller must hold the lock of the root."""
        _remove_at_once(self.path)
        _remove_if_empty(self.path.parent)


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One node of a group."""

    root: LocalCloudDir
    path: Path

    @property
    def group(self) -> LocalGroup:
        return LocalGroup(self.root, self.path.parent)

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("node-"))

    @property
    def notice_path(self) -> Path:
        """The file whose creation is the preemption notice."""
        return self.path / "notice"

    @property
    def output_path(self) -> Path:
        """The file with stdout and stderr of the agent."""
        return self.path / "output"

    @property
    def scratch_path(self) -> Path:
        """The scratch directory of the agent and its workers."""
        return self.path / "scratch"

    def claim(self, process: ProcessIdentity) -> bool:
        """Make `process` the machine of this node; False if it has another one or was removed."""
        # A hard link is created atomically and fails if the name exists, so one process succeeds.
        draft = self.path / f".machine-{process}"
        try:
            draft.write_text(str(process))
            os.link(draft, self.path / "machine")
        except FileExistsError:
            return self.machine() == process
        except FileNotFoundError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def machine(self) -> ProcessIdentity | None:
        """Return the machine of this node, or None if it has none yet."""
        text = _read_text(self.path / "machine")
        return None if text is None else ProcessIdentity.parse(text)

    def read_assignment(self) -> dict[str, Any] | None:
        """Return the assignment, or None if the node was cancelled."""
        text = _read_text(self.path / "assignment")
        return None if text is None else cast("dict[str, Any]", json.loads(text))

    def renew_assignment(self) -> None:
        """Restart `START_TIMEOUT_S`, because a machine is about to be started."""
        with contextlib.suppress(FileNotFoundError):  # it is read already
            os.utime(self.path / "assignment")

    def delete_assignment(self) -> None:
        """Delete the assignment, which contains the run key."""
        (self.path / "assignment").unlink(missing_ok=True)

    def write_notice(self, notice: bytes) -> None:
        """Write the preemption notice atomically."""
        self._write_mark("notice", notice.decode())

    def mark_reclaimed(self, reason: str) -> None:
        """Record the reason of a preemption, before it happens."""
        self._write_mark("reclaimed", reason)

    def mark_failed(self, reason: str) -> None:
        """Record the reason of a failure of the agent."""
        self._write_mark("ended", reason)

    def mark_stopped(self) -> None:
        """Record that its machine has ended, unless that is recorded already."""
        if not (self.path / "stopped").exists():
            self._write_mark("stopped", "")

    def _write_mark(self, name: str, text: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the group was cancelled
            _write_atomically(self.path / name, text)

    def status(self) -> NodeStatus:
        """Return the status; see the module docstring."""
        if not self.path.is_dir():
            return NodeStatus(state=NodeState.GONE, reason="its agent has exited")
        # Before `machine`: the assignment is deleted after the node was claimed.
        assigned_at_ms = _modified_at_ms(self.path / "assignment")
        machine = self.machine()
        # By the clock of this computer, as everything in the directory.
        started_at_ms = _modified_at_ms(self.path / "machine")
        if (reason := _read_text(self.path / "ended")) is not None:
            # The last line of output usually names the error.
            last = (_read_text(self.output_path) or "").strip().splitlines()[-1:]
            output = f": {last[0][:500]}" if last else ""
            return NodeStatus(
                state=NodeState.FAILED,
                reason=f"{reason}{output}",
                started_at_ms=started_at_ms,
                ended_at_ms=_modified_at_ms(self.path / "ended"),
            )
        if machine is None:
            return _status_before_start(assigned_at_ms)
        if machine.is_alive:
            return NodeStatus(state=NodeState.RUNNING, started_at_ms=started_at_ms)
        return NodeStatus(
            state=NodeState.GONE,
            reason=_read_text(self.path / "reclaimed") or "its process has ended",
            started_at_ms=started_at_ms,
            ended_at_ms=_modified_at_ms(self.path / "stopped"),
        )

    def remove(self) -> None:
        """Remove the node of an agent that exited successfully, and its group with the last one."""
        group = self.group
        with self.root.lock():
            _remove_at_once(self.path)
            if all(node.status().is_terminated for node in group.nodes()):
                group.remove()


def _status_before_start(assigned_at_ms: int | None) -> NodeStatus:
    """Return the status of a node without a machine, whose assignment was written at that time."""
    if assigned_at_ms is None:
        return NodeStatus(state=NodeState.GONE, reason="its directory was removed")
    # The submitter has not started the machine yet, or was killed before; another submit starts it.
    if system.wall_ms() - assigned_at_ms < START_TIMEOUT_S * 1000:
        return NodeStatus(state=NodeState.WAITING, reason="its process is being started")
    reason = f"its process was not started within {START_TIMEOUT_S:.0f} s"
    return NodeStatus(state=NodeState.GONE, reason=reason)


def _subdirectories(folder: Path, *, hidden: bool = False) -> list[Path]:
    """Return the subdirectories whose names start with a dot, or all others, sorted."""
    try:
        return sorted(
            entry
            for entry in folder.iterdir()
            if entry.is_dir() and entry.name.startswith(".") == hidden
        )
    except (FileNotFoundError, NotADirectoryError):
        return []


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def _remove_at_once(folder: Path) -> None:
    """Remove a directory whose files other processes may be writing. Requires the root's lock."""
    # Renamed first: a file that is created meanwhile would keep a part of the directory.
    removed = _hidden(folder)
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _modified_at_ms(path: Path) -> int | None:
    """Return when the file was written, in milliseconds since 1970; None if it does not exist."""
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write_atomically(path: Path, text: str) -> None:
    """Replace the file atomically; only this user may read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
