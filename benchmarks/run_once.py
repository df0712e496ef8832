"""Run one side once: start it, measure its process tree, read its events, and clean up."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peers, process_tree

# How long daemons may take to exit after the program.
GRACE_S = 5.0
POLL_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """The work, identical on every side."""

    work: str
    """The training function: of `workload.py`, or `module.function` of another benchmark."""
    config: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 4
    fits: int = 1
    max_failures: int = 0
    nodes: int = 1
    trainer: str = "torch.TorchTrainer"
    """The class below `spotfit` and `ray.train`."""
    storage: str = ""
    """Storage path of the run; empty: a temporary directory."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """A recorded event: name, time, the `fit` it belongs to, and fields."""

    name: str
    at: float
    fit: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a run, in order."""

    every: tuple[Event, ...]

    def named(self, name: str, **expected: Any) -> tuple[Event, ...]:
        """Return the events with this name and these fields."""
        return tuple(
            event
            for event in self.every
            if event.name == name
            and all(_field(event, key) == value for key, value in expected.items())
        )

    def when_all(self, name: str, ranks: int, **expected: Any) -> float | None:
        """Return the time of the last rank's event; None if a rank has none."""
        first: dict[int, float] = {}
        for event in self.named(name, **expected):
            first.setdefault(event.fields["rank"], event.fields.get("entered", event.at))
        return max(first.values()) if len(first) == ranks else None


def _field(event: Event, key: str) -> Any:
    return event.fit if key == "fit" else event.fields.get(key)


def parse_events(lines: Iterable[str]) -> Events:
    """Parse recorded events; a line cut short by a kill is skipped."""
    found = []
    for line in lines:
        if line.endswith("}\n"):
            fields = json.loads(line)
            found.append(Event(fields.pop("event"), fields.pop("at"), fields.pop("fit"), fields))
    return Events(tuple(found))


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has exited, or was killed because it hung."""

    setting: str
    started: float
    ended: float
    exit_code: int | None
    events: Events
    cpu: tuple[tuple[float, float], ...]
    cpu_s: float
    processes: int
    leftover_processes: int
    load: float
    pressure: float
    tail: str

    @property
    def hung(self) -> bool:
        return self.exit_code is None

    def cpu_between(self, since: float, until: float) -> float:
        return process_tree.between(list(self.cpu), since, until)


def run_once(setting: peers.Setting, job: Job, *, limit_s: float) -> Run:
    """Run the job on this side; a run without events for `limit_s` is killed."""
    # A short path: the path of a Unix socket is limited to about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="sfb-"))
    try:
        return _run_in(folder, setting, job, limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, setting: peers.Setting, job: Job, limit_s: float) -> Run:
    command = peers.command(setting, _job_config(folder, setting, job))
    load, pressure = load_average(), cpu_pressure()
    tree = process_tree.ProcessTree(uuid.uuid4().hex)
    with tree, (folder / "output").open("wb") as output:
        environment = (
            peers.environment(setting)
            | dict(job.environment)
            | {
                process_tree.TAG: tree.tag,
                "RAY_TMPDIR": str(folder),
                "TMPDIR": str(folder),
                "HOME": str(folder),
            }
        )
        started = time.time()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output
        )
        exit_code = _wait(process, folder / "events", limit_s)
        ended = time.time()
        left = tree.end(GRACE_S if exit_code is not None else 0.0)
        process.wait()
    return Run(
        setting=setting.name,
        started=started,
        ended=ended,
        exit_code=exit_code,
        events=_events(folder),
        cpu=tuple(tree.series),
        cpu_s=tree.cpu_s,
        processes=tree.processes,
        leftover_processes=left,
        load=load,
        pressure=max(pressure, cpu_pressure()),
        tail=_tail(folder / "output"),
    )


def _job_config(folder: Path, setting: peers.Setting, job: Job) -> dict[str, Any]:
    for name in ("storage", "kill_markers"):
        (folder / name).mkdir(parents=True)
    own = {
        "side": setting.side,
        "events": str(folder / "events"),
        "kill_markers": str(folder / "kill_markers"),
    }
    return {
        "work": job.work,
        "config": dict(job.config) | own,
        "workers": job.workers,
        "fits": job.fits,
        "max_failures": job.max_failures,
        "nodes": job.nodes,
        "trainer": job.trainer,
        "storage": job.storage or str(folder / "storage"),
    }


def _wait(
    process: subprocess.Popen[bytes], events_file: Path, silence_limit_s: float
) -> int | None:
    """Wait for the end; None for a run without events for too long."""
    started = time.time()
    while time.time() - max(started, _last_event_at(events_file)) < silence_limit_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_INTERVAL_S)
    return None


def _last_event_at(events_file: Path) -> float:
    return events_file.stat().st_mtime if events_file.exists() else 0.0


def _events(folder: Path) -> Events:
    events_file = folder / "events"
    if not events_file.exists():
        return Events(())
    with events_file.open() as lines:
        return parse_events(lines)


def _tail(output: Path, size_bytes: int = 3000) -> str:
    return output.read_bytes()[-size_bytes:].decode(errors="replace")


def load_average() -> float:
    return os.getloadavg()[0]


def cpu_pressure() -> float:
    """Return the percentage of the last ten seconds in which a process waited for a CPU."""
    return parse_pressure(Path("/proc/pressure/cpu").read_text())


def parse_pressure(text: str) -> float:
    some = text.partition("\n")[0]
    fields = dict(word.split("=") for word in some.split()[1:])
    return float(fields["avg10"])
