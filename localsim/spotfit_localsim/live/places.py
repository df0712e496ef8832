"""Where the local cloud keeps what it knows: a few small directories, each with one meaning.

<root>/lock                       one submitter at a time
<root>/capacity                   how many nodes there are, and whose word that is, while it lives
<root>/machines/<pid>-<started>/  a machine: the socket it listens at, its temporary files
<root>/<run>/<token>/node-<k>/    a node of a group, from submit to its end or to cancel
    assignment                    what its machine is to do; gone once it has been read
    machine                       which machine it is; the first to write it is the one
    notice                        it will be taken away
    reclaimed                     it was taken away, and why
    ended                         its agent failed, and how
    output                        what its agent says
    scratch                       its agent's and workers' own
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
from spotfit.model.group import NodeState, NodeStatus
from spotfit_localsim.live.processes import Process, here

_PRIVATE = 0o700
_MACHINES = "machines"


@dataclass(frozen=True, slots=True)
class Root:
    """The directory of one local cloud, readable by its user only."""

    path: Path

    @classmethod
    def default(cls) -> Root:
        """One for each user of this machine."""
        return cls(Path(tempfile.gettempdir()) / f"spotfit-{os.getuid()}")

    def open(self) -> Root:
        """Make the directory. Raises `ProvisionPermissionError` for one that others can enter."""
        self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ProvisionPermissionError(
                f"{self.path} is not a directory of this user alone; nodes keep their keys in it.",
                do="Remove it, chmod it to 700, or set LocalOptions(root=…) to one of your own.",
            )
        return self

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock of one that died is free."""
        descriptor = self._lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):  # tidied away between two calls of ours
                descriptor = os.open(self.open().path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_still(descriptor, self.path / "lock"):
                    return descriptor
                os.close(descriptor)  # or while we waited

    def tidy(self) -> None:
        """Forget machines that are gone, and the root itself if nothing of it is in use."""
        if not self.path.exists():
            return
        with self.locked():
            for process in self.machines():
                if not process.alive:
                    self.forget(process)
            if self.capacity() is None:
                (self.path / "capacity").unlink(missing_ok=True)
            for folder in (self.path / _MACHINES, *self._runs()):
                _remove_if_empty(folder)
            if [entry.name for entry in self.path.iterdir()] == ["lock"]:
                (self.path / "lock").unlink()
                _remove_if_empty(self.path)

    # --- machines -----------------------------------------------------------------------------

    def machines(self) -> list[Process]:
        """Every machine that has a home here, dead ones too."""
        homes = _entries(self.path / _MACHINES)
        return [process for home in homes if (process := Process.parse(home.name)) is not None]

    def home(self, process: Process) -> Path:
        """Where that machine keeps its socket and its temporary files."""
        return self.path / _MACHINES / str(process)

    def forget(self, process: Process) -> None:
        """Remove the home of a machine that is gone."""
        shutil.rmtree(self.home(process), ignore_errors=True)

    # --- groups -------------------------------------------------------------------------------

    def group(self, run: RunId, token: Token) -> Group:
        return Group(self, self.path / run / token)

    def groups(self) -> Iterator[Group]:
        """Every group that anybody remembers."""
        for run in self._runs():
            for folder in _entries(run):
                if not folder.name.startswith("."):
                    yield Group(self, folder)

    def _runs(self) -> list[Path]:
        known = {"lock", "capacity", _MACHINES}
        return [entry for entry in _entries(self.path) if entry.name not in known]

    # --- capacity -----------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """How many nodes there are at present, if a process that lives has said so."""
        nodes, _, owner = (_read(self.path / "capacity") or "").partition(" ")
        process = Process.parse(owner)
        return int(nodes) if process is not None and process.alive else None

    def limit(self, nodes: int | None) -> None:
        """From now on, and while this process lives, there are so many nodes; None: as many as
        the options say."""
        if nodes is None:
            (self.path / "capacity").unlink(missing_ok=True)
            self.tidy()
            return
        with self.locked():
            _write(self.path / "capacity", f"{nodes} {here()}")


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one token. It appears at once and whole, by one rename."""

    root: Root
    path: Path

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def run(self) -> RunId:
        return RunId(self.path.parent.name)

    @property
    def token(self) -> Token:
        return Token(self.path.name)

    def create(self, assignments: list[Mapping[str, Any]]) -> None:
        """A node for each assignment. Only for whoever holds the root's lock."""
        draft = self.path.parent / f".{self.path.name}"
        shutil.rmtree(draft, ignore_errors=True)
        for number, assignment in enumerate(assignments):
            node = Node(self.root, draft / f"node-{number}")
            node.path.mkdir(mode=_PRIVATE, parents=True)
            _write(node.path / "assignment", json.dumps(assignment))
        draft.rename(self.path)

    def node(self, number: int) -> Node:
        return Node(self.root, self.path / f"node-{number}")

    def nodes(self) -> list[Node]:
        """Those that have not ended well."""
        return [Node(self.root, entry) for entry in _entries(self.path)]

    def remove(self) -> None:
        """Forget the group."""
        with self.root.locked():
            shutil.rmtree(self.path, ignore_errors=True)
            _remove_if_empty(self.path.parent)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a group, as everybody on this machine sees it."""

    root: Root
    path: Path

    @property
    def group(self) -> Group:
        return Group(self.root, self.path.parent)

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("node-"))

    @property
    def notice(self) -> Path:
        """The file whose appearance is the notice."""
        return self.path / "notice"

    @property
    def output(self) -> Path:
        """What its agent says, for whoever looks into a failure."""
        return self.path / "output"

    @property
    def scratch(self) -> Path:
        """Space its agent and its workers may fill."""
        return self.path / "scratch"

    def claim(self, process: Process) -> bool:
        """Make `process` the machine of this node; False if it has another one, or is no more."""
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

    def machine(self) -> Process | None:
        """The machine of this node; None while it has none."""
        text = _read(self.path / "machine")
        return None if text is None else Process.parse(text)

    def assignment(self) -> dict[str, Any] | None:
        """What the machine is to do; None if the node was cancelled meanwhile."""
        text = _read(self.path / "assignment")
        return None if text is None else cast("dict[str, Any]", json.loads(text))

    def assignment_was_read(self) -> None:
        """The secret in it has no reason to lie there any longer."""
        (self.path / "assignment").unlink(missing_ok=True)

    def announce(self, notice: bytes) -> None:
        """Let the notice appear, whole."""
        self._note("notice", notice.decode())

    def reclaimed(self, why: str) -> None:
        """Note, before it happens, that the node is taken away."""
        self._note("reclaimed", why)

    def ended(self, how: str) -> None:
        """Note that the node's agent failed."""
        self._note("ended", how)

    def _note(self, name: str, text: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # cancelled meanwhile: nobody wants to know
            _write(self.path / name, text)

    def status(self) -> NodeStatus:
        """What became of it."""
        if not self.path.is_dir():
            return NodeStatus(NodeState.GONE, "it has ended")
        machine = self.machine()
        if machine is None:
            return NodeStatus(NodeState.WAITING, "its process is being started")
        if machine.alive and _read(self.path / "ended") is None:
            return NodeStatus(NodeState.RUNNING)
        if (how := _read(self.path / "ended")) is not None:
            return NodeStatus(NodeState.FAILED, f"{how}{self._last_words()}")
        return NodeStatus(NodeState.GONE, _read(self.path / "reclaimed") or "its process is gone")

    def _last_words(self) -> str:
        said = (_read(self.output) or "").strip().splitlines()[-1:]
        return f": {said[0][:500]}" if said else ""

    def leave(self) -> None:
        """The agent has ended well: remove the node, and its group with the last of them."""
        group = self.group
        with self.root.locked():
            shutil.rmtree(self.path, ignore_errors=True)
            if all(node.status().over for node in group.nodes()):
                shutil.rmtree(group.path, ignore_errors=True)
            _remove_if_empty(group.path.parent)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(path: Path, text: str) -> None:
    """All of it or nothing, for this user's eyes only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
