"""The datacenter of a simulated cloud: each machine is a process tree with a directory of its own.

States of a machine:

    state    | event                                         | next
    booting  | the boot time is over                         | up
    booting  | stopped, or preempted                         | over
    up       | the command exits, or its process dies        | over
    up       | stop() or a preemption notice: a grace period | up, killed at `kill_due_s`
    up       | `kill_due_s` is reached, or preempted without notice | over
    up       | uses more memory than its container may (`memory_limits`) | over

The state of each machine is stored in its directory, so a restarted simulator finds its machines.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import msgspec

from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError
from spotfit.host import env, system
from spotfit.model.offer import Market
from spotfit_localsim.clouds.capacity import RealTimeMarket
from spotfit_localsim.random_streams import SeededStreams
from spotfit_provisioners.local.processes import (
    ProcessIdentity,
    descendant_pids,
    find_process,
    kill_process_tree,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_INIT_SCRIPT = """trap : TERM
"$@" </dev/null >>output 2>&1 & child=$!
echo $child >agent
while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || break; done
echo $code >.ended && mv .ended ended"""
"""The init process of a machine. It runs the command, survives SIGTERM (which only the command
gets), and records the exit code.
"""

MachineState = Literal["booting", "up", "over"]


class SimulatedMachine(msgspec.Struct):
    """One machine. `number` is never reused; times are seconds since 1970."""

    number: int
    task: str
    """The task that it was rented for, an id of the cloud."""
    command: list[str]
    environment: dict[str, str]
    created_at_s: float
    boot_due_s: float
    market: Market = Market.SPOT
    started_at_s: float | None = None
    """When its command was started; None before."""
    lifetime_s: float | None = None
    """Time from boot to preemption; None for no preemption."""
    gets_notice: bool = True
    """Whether the preemption is announced."""
    state: MachineState = "booting"
    pid: str = ""
    metadata_port: int = 0
    noticed_at_s: float | None = None
    """When the preemption notice was given."""
    advised_at_s: float | None = None
    """When a rebalance recommendation was given, where the cloud has them."""
    silent_since_s: float | None = None
    """Since when its processes are frozen."""
    kill_due_s: float | None = None
    """When it will be killed."""
    end_reason: str = ""
    """Why it ended or will end: `RECLAIMED`, `STOPPED`, `ENDED`, `LOST` or `OUT_OF_MEMORY`."""
    pending_signal: int | None = None
    """A signal to deliver as soon as the command runs."""
    exit_code: int | None = None
    """Exit code of the command; None if it was killed or still runs."""
    ended_at_s: float | None = None
    memory_limit_mib: int | None = None
    """Memory that its container may use; None without a limit."""
    gpus: int = 0
    memory_measured_at_s: float = 0.0

    @property
    def is_active(self) -> bool:
        """Whether the machine exists and is billed."""
        return self.state != "over"

    @property
    def address(self) -> str:
        """A loopback address of its own."""
        # Avoids the last octets 0 and 255.
        high, low = divmod(self.number, 250)
        return f"127.1.{high % 250}.{low + 1}"

    @property
    def was_reclaimed(self) -> bool:
        """Whether it was preempted while its command was running."""
        return self.state == "over" and self.end_reason == RECLAIMED and self.exit_code is None


RECLAIMED, STOPPED, ENDED, LOST = "reclaimed", "stopped", "ended", "lost"
OUT_OF_MEMORY = "out of memory"
_KILLED_EXIT_CODE = 137  # 128 + SIGKILL
# That of containerd's StartError.
_NOT_STARTED_EXIT_CODE = 128
# Measuring takes a millisecond per process.
_MEMORY_INTERVAL_S = 0.2


@dataclass
class MachineHooks:
    """What a cloud adds to each of its machines."""

    environment: Callable[[SimulatedMachine], Mapping[str, str]] = lambda _: {}
    """Environment variables of the machine's tasks."""
    serve_metadata: Callable[[SimulatedMachine], int] = lambda _: 0
    """Starts the machine's metadata service at its address and returns the port."""
    close_metadata: Callable[[SimulatedMachine], None] = lambda _: None


def _locked(
    method: Callable[Concatenate[Datacenter, _P], _R],
) -> Callable[Concatenate[Datacenter, _P], _R]:
    """Hold the `lock` of the datacenter while the method runs."""

    @functools.wraps(method)
    def run(datacenter: Datacenter, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with datacenter.lock:
            return method(datacenter, *args, **kwargs)

    return run


@dataclass
class Datacenter:
    """All machines of one simulated cloud. Call `tick` often; threads may share an instance."""

    root: Path
    market: RealTimeMarket
    hooks: MachineHooks = field(default_factory=MachineHooks)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by each method that changes a machine."""
    machines: dict[int, SimulatedMachine] = field(default_factory=dict)
    sets_region: bool = False
    """Whether the cloud names its region in the environment of machines."""
    _children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _output_sizes: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """(time, output size) of each machine, for delayed logs. Not stored: after a restart all
    output is visible.
    """

    @classmethod
    def open(cls, root: Path, market: RealTimeMarket) -> Datacenter:
        """Open a datacenter with the machines of earlier simulator processes."""
        datacenter = cls(root, market)
        for path in sorted(datacenter._machine_dirs.glob("*/machine.json")):
            # Their processes may still run; the next tick finds out.
            machine = msgspec.json.decode(path.read_bytes(), type=SimulatedMachine)
            datacenter.machines[machine.number] = machine
        return datacenter

    # --- renting -----------------------------------------------------------------------------

    @_locked
    def rent(
        self,
        task: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        market: Market = Market.SPOT,
        memory_limit_mib: int | None = None,
        gpus: int = 0,
    ) -> SimulatedMachine | None:
        """Rent a machine that runs the command after its boot; None without capacity.

        `memory_limit_mib` is the limit of its container, `gpus` the number of GPUs that its agent
        finds.
        """
        now = _now_s()
        rented = [one for one in self.active_machines() if one.market is market]
        if len(rented) >= self.market.capacity_at(now, market):
            return None
        number = max(self.machines, default=0) + 1
        # A stream for each machine: its fate does not depend on how many were rented before.
        stream = SeededStreams(f"{self.market.options.seed}/{number}").stream("life")
        machine = SimulatedMachine(
            number=number,
            task=task,
            command=list(command),
            environment=dict(environment),
            created_at_s=now,
            boot_due_s=now + self.market.draw_boot_s(stream, market),
            market=market,
            lifetime_s=self.market.draw_lifetime_s(stream, market),
            gets_notice=self.market.draw_notice(stream),
            memory_limit_mib=memory_limit_mib,
            gpus=gpus,
        )
        self.machines[number] = machine
        self._persist(machine)
        return machine

    def active_machines(self) -> Iterator[SimulatedMachine]:
        """Yield the active machines, oldest first."""
        # A copy: another thread may rent a machine meanwhile.
        return (machine for machine in list(self.machines.values()) if machine.is_active)

    def find_machine(self, task: str) -> SimulatedMachine | None:
        """Return the machine that was last rented for the task, or None."""
        machines = [machine for machine in self.machines.values() if machine.task == task]
        return machines[-1] if machines else None

    # --- ending ------------------------------------------------------------------------------

    @_locked
    def stop(self, machine: SimulatedMachine, *, grace_s: float) -> None:
        """Send SIGTERM to its command, and SIGKILL to all its processes after the grace period."""
        if machine.state == "booting":
            self._terminate(machine, STOPPED)
        # A second stop must not extend the grace period.
        elif machine.is_active and machine.end_reason != STOPPED:
            machine.end_reason, machine.kill_due_s = STOPPED, _now_s() + grace_s
            self.send_signal(machine, signal.SIGTERM)
            self._persist(machine)

    @_locked
    def reclaim(self, machine: SimulatedMachine, *, notice: bool) -> None:
        """Preempt the machine: after `notice_s` with a notice, or at once.

        A machine that already has a notice ignores another one. Raises `ConfigError` for an
        on-demand machine.
        """
        if machine.market is Market.ON_DEMAND:
            raise ConfigError(f"Machine {machine.number} is an on-demand machine: no preemptions.")
        if not machine.is_active or (notice and machine.noticed_at_s is not None):
            return
        if notice and machine.state == "up":
            machine.noticed_at_s = _now_s()
            machine.end_reason, machine.kill_due_s = (
                RECLAIMED,
                machine.noticed_at_s + self.market.options.notice_s,
            )
            self._persist(machine)
        else:
            self._terminate(machine, RECLAIMED)

    @_locked
    def advise(self, machine: SimulatedMachine) -> None:
        """Give a rebalance recommendation; the machine keeps running."""
        machine.advised_at_s = _now_s()
        self._persist(machine)

    @_locked
    def silence(self, machine: SimulatedMachine) -> None:
        """Freeze its processes: it is billed but does not respond any more."""
        process = ProcessIdentity.parse(machine.pid)
        if process is not None and machine.state == "up":
            # The init script leads a process group with everything that the command starts.
            os.killpg(process.pid, signal.SIGSTOP)
            machine.silent_since_s = _now_s()
            self._persist(machine)

    @_locked
    def remove(self, machine: SimulatedMachine) -> None:
        """Delete the record and files of a terminated machine."""
        del self.machines[machine.number]
        self._output_sizes.pop(machine.number, None)
        shutil.rmtree(self._machine_dir(machine), ignore_errors=True)

    @staticmethod
    def host(machine: SimulatedMachine) -> str:
        """Return its IP address: its own on Linux, where all of 127.0.0.0/8 is local."""
        return machine.address if sys.platform == "linux" else "127.0.0.1"

    def output(self, machine: SimulatedMachine, *, delay_s: float = 0.0) -> str:
        """Return the output of its command up to `delay_s` ago, as clouds publish logs with a
        delay."""
        try:
            body = (self._machine_dir(machine) / "output").read_bytes()
        except FileNotFoundError:
            return ""
        if delay_s and machine.number in self._output_sizes:
            cutoff_s = _now_s() - delay_s
            visible_sizes = [
                size for at, size in self._output_sizes[machine.number] if at <= cutoff_s
            ]
            body = body[: max(visible_sizes, default=0)]
        return body.decode(errors="replace")

    def _record_output_size(self, machine: SimulatedMachine, now: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = (self._machine_dir(machine) / "output").stat().st_size
            sizes = self._output_sizes.setdefault(machine.number, [])
            # Only changes are recorded; the list stays short.
            if size and (not sizes or sizes[-1][1] != size):
                sizes.append((now, size))

    @_locked
    def send_signal(self, machine: SimulatedMachine, signal_number: signal.Signals) -> None:
        """Send a signal to its command now, or as soon as the command runs."""
        machine.pending_signal = None
        try:
            os.kill(int((self._machine_dir(machine) / "agent").read_text()), signal_number)
        except (FileNotFoundError, ValueError):
            # The command has not started: the next tick tries again.
            machine.pending_signal = int(signal_number)
        except ProcessLookupError:  # the command has exited
            return

    # --- tick --------------------------------------------------------------------------------

    @_locked
    def tick(self) -> None:
        """Boot machines, detect exited ones and carry out due preemptions."""
        now = _now_s()
        for machine in list(self.active_machines()):
            self._record_output_size(machine, now)
            if machine.state == "booting":
                if now >= machine.boot_due_s:
                    self._boot(machine)
            elif not self._is_running(machine):
                # A command that ends after its notice ended because of the preemption.
                reclaimed = machine.end_reason == RECLAIMED
                self._terminate(machine, RECLAIMED if reclaimed else ENDED)
            elif machine.kill_due_s is not None and now >= machine.kill_due_s:
                self._terminate(machine, machine.end_reason)
            elif self._exceeds_memory_limit(machine, now):
                self._terminate(machine, OUT_OF_MEMORY)
            elif machine.pending_signal is not None:
                self.send_signal(machine, signal.Signals(machine.pending_signal))
            elif machine.lifetime_s is not None and now >= machine.boot_due_s + machine.lifetime_s:
                self.reclaim(machine, notice=machine.gets_notice)
        # The youngest spot machines are preempted when capacity falls below their number. Capacity
        # that on-demand machines lose is only refused to later requests.
        unnoticed = [
            one
            for one in self.active_machines()
            if one.noticed_at_s is None and one.market is Market.SPOT
        ]
        for machine in unnoticed[max(0, self.market.capacity_at(now)) :]:
            self.reclaim(machine, notice=machine.gets_notice)

    def _exceeds_memory_limit(self, machine: SimulatedMachine, now: float) -> bool:
        limit_mib, process = machine.memory_limit_mib, ProcessIdentity.parse(machine.pid)
        is_due = now - machine.memory_measured_at_s >= _MEMORY_INTERVAL_S
        if limit_mib is None or process is None or not is_due:
            return False
        machine.memory_measured_at_s = now
        return (
            self.market.options.memory_limits
            and memory_bytes_of_tree(process.pid) > limit_mib * 2**20
        )

    def _boot(self, machine: SimulatedMachine) -> None:
        directory = self._machine_dir(machine)
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        machine.metadata_port = self.hooks.serve_metadata(machine)
        inherited = env.copy_environment()
        # Settings of the process that started the simulator belong to another run.
        kept = {
            name: text
            for name, text in inherited.items()
            if name in _INHERITED_VARIABLES
            or not (name.startswith("SPOTFIT_") or name in _LAPTOP_VARIABLES)
        }
        environment = {
            **kept,
            # Agents run with this Python.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}",
            SIM_ROOT_ENV: str(self.root),
            "SPOTFIT_HOST": self.host(machine),
            # All machines run under one kernel, and thus have one boot id.
            "SPOTFIT_INSTANCE": self._instance_id(machine),
            # Instead of the GPUs that a driver lists in /proc.
            "SPOTFIT_DEVICES": ",".join(f"cuda:{n}" for n in range(machine.gpus)),
            "SPOTFIT_SCRATCH": str(directory / "tmp"),
            "TMPDIR": str(directory / "tmp"),
            **self.hooks.environment(machine),
            **machine.environment,
        }
        try:
            child = subprocess.Popen(  # noqa: S603  # runs the command that the machine was rented for
                ["/bin/sh", "-c", _INIT_SCRIPT, "machine", *machine.command],
                env=environment,
                cwd=directory,
                # Machines outlive the simulator process, as those of a cloud outlive a client.
                start_new_session=True,
            )
        # A NUL byte, '=' in the name of a variable, or too many bytes.
        except (OSError, ValueError) as error:
            (directory / "output").write_text(f"The container cannot start: {error}\n")
            (directory / "ended").write_text(str(_NOT_STARTED_EXIT_CODE))
            self._terminate(machine, ENDED)
            return
        self._children[machine.number] = child
        machine.pid = str(find_process(child.pid) or "")
        machine.state, machine.started_at_s = "up", _now_s()
        self._persist(machine)

    def _instance_id(self, machine: SimulatedMachine) -> str:
        number = (machine.number - 1) // self.market.options.machines_per_instance
        return f"sim-{number:06d}"

    def _is_running(self, machine: SimulatedMachine) -> bool:
        child = self._children.get(machine.number)
        # `poll` also reaps: a zombie would count as alive below.
        if child is not None and child.poll() is not None:
            return False
        process = ProcessIdentity.parse(machine.pid)
        return process is not None and process.is_alive

    def _terminate(self, machine: SimulatedMachine, reason: str) -> None:
        process = ProcessIdentity.parse(machine.pid)
        if process is not None:
            # Also processes that left the group, such as detached uploads.
            kill_process_tree(process)
        child = self._children.pop(machine.number, None)
        if child is not None:
            child.wait()
        self.hooks.close_metadata(machine)
        self._record_output_size(machine, _now_s())
        # Written by the init script; missing if the machine was killed before its command ended.
        with contextlib.suppress(FileNotFoundError, ValueError):
            machine.exit_code = int((self._machine_dir(machine) / "ended").read_text())
        if reason == OUT_OF_MEMORY:
            machine.exit_code = _KILLED_EXIT_CODE
        machine.state, machine.ended_at_s = "over", _now_s()
        # An agent that ended without an exit code was killed from outside.
        machine.end_reason = LOST if reason == ENDED and machine.exit_code is None else reason
        self._persist(machine)
        # The output and the record are kept: clients may ask for the log of an ended machine.
        shutil.rmtree(self._machine_dir(machine) / "tmp", ignore_errors=True)

    # --- on disk -----------------------------------------------------------------------------

    @property
    def _machine_dirs(self) -> Path:
        return self.root / "machines"

    def _machine_dir(self, machine: SimulatedMachine) -> Path:
        return self._machine_dirs / f"{machine.number:06d}"

    def _persist(self, machine: SimulatedMachine) -> None:
        directory = self._machine_dir(machine)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / "machine.json", encode(machine))

    @_locked
    def close(self) -> None:
        """Terminate all machines."""
        for machine in list(self.active_machines()):
            self._terminate(machine, STOPPED)


SIM_ROOT_ENV = "SPOTFIT_SIM_ROOT"
"""Environment variable of every machine: the directory of its cloud."""
_LAPTOP_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
"""Settings of the computer that calls `fit()`, which no cloud passes to its machines. Endpoints
and keys of buckets are inherited: they stand for the network and the role of a machine."""
_INHERITED_VARIABLES = ("SPOTFIT_LOG_LEVEL", "SPOTFIT_FORK")


def memory_bytes_of_tree(pid: int) -> int:
    """Return the memory of a process and its descendants; pages that they share count once.

    0 on systems other than Linux. Processes that end meanwhile are left out.
    """
    size_bytes = 0
    for one in (pid, *descendant_pids(pid)):
        # PermissionError and ProcessLookupError: the process is ending.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                # The proportional set size: shared pages are divided by their processes.
                if line.startswith("Pss:"):
                    size_bytes += int(line.split()[1]) * 1024
    return size_bytes


def write_atomically(path: Path, body: bytes) -> None:
    """Replace a file in one step; only this user may read it."""
    # A reader sees the old or the new content, also after a crash between the two.
    draft = path.with_name(f".{path.name}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        file.write(body)
    draft.replace(path)


def short_digest(*parts: object) -> str:
    """Return a short name that is equal for equal parts."""
    # 48 bits: enough for the directories of one user.
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _now_s() -> float:
    """Return seconds since 1970: comparable with times stored by an earlier simulator process."""
    return system.wall_ms() / 1000
