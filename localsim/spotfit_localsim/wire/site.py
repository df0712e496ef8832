"""The data centre behind a simulated cloud: machines that are processes, and a spot market.

A machine boots for a while, then runs one command in a process group of its own, with an address,
a home and a metadata service of its own. It ends when its command does, when it is stopped, or
when the market takes it back. All of it is kept on disk: a cloud that is started anew knows its
machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from spotfit.core.codec import encode
from spotfit.host import clocks, env
from spotfit_localsim.dice import Dice
from spotfit_localsim.live.processes import Process, find, kill
from spotfit_localsim.wire.tide import Tide

_LIVES = """trap : TERM
"$@" </dev/null >>output 2>&1 & child=$!
echo $child >agent
while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || break; done
echo $code >.ended && mv .ended ended"""
"""Runs a command, hears SIGTERM without dying of it, and writes down how the command ended."""

State = Literal["booting", "up", "over"]


class Machine(msgspec.Struct):
    """One machine. `number` is never given out again; times are seconds since 1970."""

    number: int
    task: str
    """What it was rented for, in the cloud's own words."""
    command: list[str]
    environment: dict[str, str]
    born_s: float
    up_s: float
    life_s: float | None = None
    """How long the market leaves it, if it will take it back."""
    announced: bool = True
    """Whether that will be announced."""
    state: State = "booting"
    pid: str = ""
    metadata_port: int = 0
    notice_s: float | None = None
    """When it was told that it will be taken away."""
    advised_s: float | None = None
    """When it was said to be in danger, where its cloud has a word for that."""
    silent_s: float | None = None
    """Since when nobody hears of it, though it stands."""
    ends_s: float | None = None
    """When it will be killed, whatever happens."""
    why: str = ""
    """Why it ended, or will."""
    unsent: int | None = None
    """A signal for a command that was not there yet."""
    exit_code: int | None = None
    """Of its command, if that came to an end."""
    over_s: float | None = None

    @property
    def standing(self) -> bool:
        """Whether it is there and costs something."""
        return self.state != "over"

    @property
    def address(self) -> str:
        """One of loopback's own."""
        high, low = divmod(self.number, 250)
        return f"127.1.{high % 250}.{low + 1}"

    @property
    def reclaimed(self) -> bool:
        """Whether the market took it back while its command still ran."""
        return self.state == "over" and self.why == RECLAIMED and self.exit_code is None


RECLAIMED, STOPPED, ENDED, LOST = "reclaimed", "stopped", "ended", "lost"


@dataclass
class Hooks:
    """What a cloud adds to each of its machines."""

    environment: Callable[[Machine], Mapping[str, str]] = lambda _: {}
    """What its tasks find in their environment."""
    serve_metadata: Callable[[Machine], int] = lambda _: 0
    """Opens the machine's metadata service at its address and gives the port."""
    close_metadata: Callable[[Machine], None] = lambda _: None


@dataclass
class Site:
    """All machines of one simulated cloud. Not for two threads at once; `tick` it often."""

    root: Path
    tide: Tide
    hooks: Hooks = field(default_factory=Hooks)
    machines: dict[int, Machine] = field(default_factory=dict)
    _children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _printed: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """When each machine had printed how many bytes. A cloud that is started anew tells all."""

    @classmethod
    def open(cls, root: Path, tide: Tide) -> Site:
        """With the machines that an earlier life of this cloud has left."""
        site = cls(root, tide)
        for path in sorted(site._homes.glob("*/machine.json")):
            machine = msgspec.json.decode(path.read_bytes(), type=Machine)
            site.machines[machine.number] = machine
        return site

    # --- renting -----------------------------------------------------------------------------

    def rent(
        self, task: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Machine | None:
        """A machine that will run the command once it has booted; None while there is none."""
        now = _now_s()
        if len(list(self.standing())) >= self.tide.capacity(now):
            return None
        number = max(self.machines, default=0) + 1
        dice = Dice(f"{self.tide.options.seed}/{number}").stream("life")
        machine = Machine(
            number,
            task,
            list(command),
            dict(environment),
            born_s=now,
            up_s=now + self.tide.boot_s(dice),
            life_s=self.tide.life_s(dice),
            announced=self.tide.announces(dice),
        )
        self.machines[number] = machine
        self._keep(machine)
        return machine

    def standing(self) -> Iterator[Machine]:
        """Every machine that is there, oldest first."""
        return (machine for machine in self.machines.values() if machine.standing)

    def of(self, task: str) -> Machine | None:
        """The machine that was last rented for that task."""
        found = [machine for machine in self.machines.values() if machine.task == task]
        return found[-1] if found else None

    # --- ending ------------------------------------------------------------------------------

    def stop(self, machine: Machine, *, grace_s: float) -> None:
        """SIGTERM to its command, SIGKILL to everything when the grace is over."""
        if machine.state == "booting":
            self._end(machine, STOPPED)
        elif machine.standing and machine.why != STOPPED:
            machine.why, machine.ends_s = STOPPED, _now_s() + grace_s
            self.send(machine, signal.SIGTERM)
            self._keep(machine)

    def reclaim(self, machine: Machine, *, notice: bool) -> None:
        """The market wants it back: after its notice, or at this moment, told before or not."""
        if not machine.standing or (notice and machine.notice_s is not None):
            return
        if notice and machine.state == "up":
            machine.notice_s = _now_s()
            machine.why, machine.ends_s = RECLAIMED, machine.notice_s + self.tide.options.notice_s
            self._keep(machine)
        else:
            self._end(machine, RECLAIMED)

    def advise(self, machine: Machine) -> None:
        """Say that it is in danger; nothing need follow."""
        machine.advised_s = _now_s()
        self._keep(machine)

    def silence(self, machine: Machine) -> None:
        """Freeze it: it stands, costs what it costs, and is not heard any more."""
        process = Process.parse(machine.pid)
        if process is not None and machine.state == "up":
            os.killpg(process.pid, signal.SIGSTOP)
            machine.silent_s = _now_s()
            self._keep(machine)

    def forget(self, machine: Machine) -> None:
        """Remove all trace of one that is over."""
        del self.machines[machine.number]
        self._printed.pop(machine.number, None)
        shutil.rmtree(self._home(machine), ignore_errors=True)

    @staticmethod
    def host(machine: Machine) -> str:
        """Where it is reached: at an address of its own, where the system has them."""
        return machine.address if sys.platform == "linux" else "127.0.0.1"

    def output(self, machine: Machine, *, late_s: float = 0.0) -> str:
        """What its command has printed so far, or had so long ago: clouds tell of it late."""
        try:
            body = (self._home(machine) / "output").read_bytes()
        except FileNotFoundError:
            return ""
        if late_s and machine.number in self._printed:
            until = _now_s() - late_s
            told = [size for at, size in self._printed[machine.number] if at <= until]
            body = body[: max(told, default=0)]
        return body.decode(errors="replace")

    def _note_output(self, machine: Machine, now: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = (self._home(machine) / "output").stat().st_size
            known = self._printed.setdefault(machine.number, [])
            if size and (not known or known[-1][1] != size):
                known.append((now, size))

    def send(self, machine: Machine, number: signal.Signals) -> None:
        """Send its command a signal, as a cloud's own agent would: now, or as soon as it runs."""
        machine.unsent = None
        try:
            os.kill(int((self._home(machine) / "agent").read_text()), number)
        except (FileNotFoundError, ValueError):
            machine.unsent = int(number)
        except ProcessLookupError:  # it has ended meanwhile
            return

    # --- as time goes by ---------------------------------------------------------------------

    def tick(self) -> None:
        """Boot, look who has ended, and carry out what the market decides."""
        now = _now_s()
        for machine in list(self.standing()):
            self._note_output(machine, now)
            if machine.state == "booting":
                if now >= machine.up_s:
                    self._boot(machine)
            elif not self._lives(machine):
                self._end(machine, machine.why if machine.why == RECLAIMED else ENDED)
            elif machine.ends_s is not None and now >= machine.ends_s:
                self._end(machine, machine.why)
            elif machine.unsent is not None:
                self.send(machine, signal.Signals(machine.unsent))
            elif machine.life_s is not None and now >= machine.up_s + machine.life_s:
                self.reclaim(machine, notice=machine.announced)
        self._shrink(now)

    def _shrink(self, now: float) -> None:
        """Where capacity falls the youngest machines go first."""
        staying = [m for m in self.standing() if m.notice_s is None]
        for machine in staying[max(0, self.tide.capacity(now)) :]:
            self.reclaim(machine, notice=machine.announced)

    def _boot(self, machine: Machine) -> None:
        home = self._home(machine)
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        machine.metadata_port = self.hooks.serve_metadata(machine)
        environment = {
            **self._inherited(),
            "SPOTFIT_HOST": self.host(machine),
            "SPOTFIT_SCRATCH": str(home / "tmp"),
            "TMPDIR": str(home / "tmp"),
            **self.hooks.environment(machine),
            **machine.environment,
        }
        child = subprocess.Popen(  # noqa: S603  # what a machine runs is what it was rented for
            ["/bin/sh", "-c", _LIVES, "machine", *machine.command],
            env=environment,
            cwd=home,
            start_new_session=True,
        )
        self._children[machine.number] = child
        machine.pid = str(find(child.pid) or "")
        machine.state = "up"
        self._keep(machine)

    def _inherited(self) -> dict[str, str]:
        """As on an image of the user's: our Python first, and nothing of another run."""
        mine = {k: v for k, v in env.everything().items() if not k.startswith("SPOTFIT_")}
        kept = {k: v for k, v in env.everything().items() if k in _KEPT}
        path = f"{Path(sys.executable).parent}{os.pathsep}{mine.get('PATH', '')}"
        return {**mine, **kept, "PATH": path, ROOT: str(self.root)}

    def _lives(self, machine: Machine) -> bool:
        child = self._children.get(machine.number)
        if child is not None and child.poll() is not None:
            return False
        process = Process.parse(machine.pid)
        return process is not None and process.alive

    def _end(self, machine: Machine, why: str) -> None:
        process = Process.parse(machine.pid)
        if process is not None:
            kill(process)
        child = self._children.pop(machine.number, None)
        if child is not None:
            child.wait()
        self.hooks.close_metadata(machine)
        self._note_output(machine, _now_s())
        machine.exit_code = self._exit_code(machine)
        machine.state, machine.over_s = "over", _now_s()
        machine.why = LOST if why == ENDED and machine.exit_code is None else why
        self._keep(machine)
        shutil.rmtree(self._home(machine) / "tmp", ignore_errors=True)

    def _exit_code(self, machine: Machine) -> int | None:
        try:
            return int((self._home(machine) / "ended").read_text())
        except (FileNotFoundError, ValueError):
            return None

    # --- on disk -----------------------------------------------------------------------------

    @property
    def _homes(self) -> Path:
        return self.root / "machines"

    def _home(self, machine: Machine) -> Path:
        return self._homes / f"{machine.number:06d}"

    def _keep(self, machine: Machine) -> None:
        home = self._home(machine)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(home / "machine.json", encode(machine))

    def close(self) -> None:
        """End every machine; nothing is left running."""
        for machine in list(self.standing()):
            self._end(machine, STOPPED)


ROOT = "SPOTFIT_SIM_ROOT"
"""In the environment of every machine: which cloud it lives in."""
_KEPT = ("SPOTFIT_LOG_LEVEL", "SPOTFIT_FORK")


def write(path: Path, body: bytes) -> None:
    """All of it or nothing, for this user's eyes only."""
    draft = path.with_name(f".{path.name}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        file.write(body)
    draft.replace(path)


def digest(*parts: object) -> str:
    """A short name that is equal for equal parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _now_s() -> float:
    """Seconds since 1970: a cloud that is started anew goes on where it stood."""
    return clocks.wall_ms() / 1000
