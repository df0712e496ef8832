"""What the chaos runs of all modules have in common: files, the driver process, leftovers, summary.

A chaos run has a directory of its own, which contains its files, and which is kept if it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec

from spotfit.core.codec import encode
from spotfit.host import env
from spotfit.host.system import SystemClock, wall_ms
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.crash_points import CHAOS_DIR_ENV
from spotfit_localsim.live.kill_targets import kill_processes, processes_with_variable

CLEANUP_TIMEOUT_S = 30.0
"""Enough for a store request to time out and be retried. Where runs may take longer, the machine is
slow, and the cleanup may take half as long as a run.
"""
_CLEANUP_POLL_INTERVAL_S = 0.1


class LiveRun:
    """The directory and the processes of one chaos run."""

    driver_module: ClassVar[str]
    """The module whose `--act <mode> <folder>` is the driver process."""

    def __init__(self, plan: msgspec.Struct, folder: Path, proxy_url: str) -> None:
        self.folder = folder
        self.proxy_url = proxy_url
        self.started_ms = 0
        (folder / "tmp").mkdir(parents=True)
        (folder / "logs").mkdir()
        (folder / "plan.json").write_bytes(encode(plan))

    def environment(self) -> dict[str, str]:
        """The environment variables of all processes."""
        return env.copy_environment() | {
            CHAOS_DIR_ENV: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            # The keys of the user must not be mixed with those of a test.
            "SPOTFIT_HOME": str(self.folder / "keys"),
            "AWS_ENDPOINT_URL": self.proxy_url,
            "AWS_ACCESS_KEY_ID": "chaos",
            "AWS_SECRET_ACCESS_KEY": "chaos",
            "AWS_REGION": "us-east-1",
            # boto would wait seconds for a metadata service.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start_driver(self, mode: str) -> subprocess.Popen[bytes]:
        """Start the process that calls `fit()`."""
        with (self.folder / "logs" / "driver.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", self.driver_module, "--act", mode, str(self.folder)],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def last_line_of_driver(self) -> str:
        """Return the last line that the driver printed."""
        output = (read_text(self.folder / "logs" / "driver.log") or "").strip()
        return output.rpartition("\n")[2] or "no output"

    def log(self, text: str) -> None:
        """Add a line to the events of the run."""
        with (self.folder / "logs" / "events.log").open("a") as log:
            log.write(f"{text}\n")

    def log_event(self, text: str) -> None:
        """Add a line with the time since the start of the run."""
        self.log(f"{(wall_ms() - self.started_ms) / 1000:6.2f} s  {text}")

    def event_lines(self) -> list[str]:
        """Return the lines of `log`."""
        return (read_text(self.folder / "logs" / "events.log") or "").splitlines()

    # --- leftovers -----------------------------------------------------------------------------

    def find_leftovers(self, timeout_s: float) -> list[str]:
        """Return the processes and paths that still exist after `timeout_s`."""
        clock = SystemClock()
        deadline = clock.now() + timeout_s
        while clock.now() < deadline and (self.leftover_paths() or self.running_processes()):
            clock.wait(_CLEANUP_POLL_INTERVAL_S)
        return [f"process {text}" for text in self.running_processes()] + self.leftover_paths()

    def leftover_paths(self) -> list[str]:
        """Return the paths that must not exist after the run."""
        return [str(path) for path in (self.folder / "tmp").iterdir()]

    def running_processes(self) -> list[str]:
        """Return the processes of the run, as 'pid name'."""
        return processes_with_variable(CHAOS_DIR_ENV, str(self.folder))

    def kill_all(self) -> None:
        """Kill all remaining processes."""
        kill_processes(self.running_processes())


# --- outcomes ---------------------------------------------------------------------------------


class ChaosOutcome(NamedTuple):
    """The outcome of a plan."""

    log_lines: list[str]
    violations: list[str]
    effective_kills: int
    """Kills, and other faults at a chosen time, while the run was active."""
    late_kills: int
    """Those after the end of the run, or that never happened."""
    duration_s: float
    """Time from the start of the driver to the end of the run; 0 without an end."""


@dataclass
class LiveChaosSummary:
    """Counts over all runs."""

    run_count: int = 0
    failed_runs: int = 0
    effective_kills: int = 0
    """Kills, and other faults at a chosen time, while a run was active."""
    late_kills: int = 0
    """Those after the end of a run, in spite of replays."""

    def __str__(self) -> str:
        late = f", {self.late_kills} too late" if self.late_kills else ""
        return (
            f"{self.run_count} runs, {self.failed_runs} failed; "
            f"{self.effective_kills} kills effective{late}"
        )

    def add(self, outcome: ChaosOutcome) -> None:
        """Count one outcome."""
        self.run_count += 1
        self.failed_runs += bool(outcome.violations)
        self.effective_kills += outcome.effective_kills
        self.late_kills += outcome.late_kills


def run_seeds(
    seeds: Iterable[int], folder: Path, run_seed: Callable[[int, str], tuple[ChaosOutcome, str]]
) -> LiveChaosSummary:
    """Call `run_seed(seed, proxy_url)` for each seed, and print the outcome and its description."""
    summary = LiveChaosSummary()
    with faulty_store_proxy() as proxy_url:
        for seed in seeds:
            outcome, description = run_seed(seed, proxy_url)
            summary.add(outcome)
            late = f", {outcome.late_kills} too late" if outcome.late_kills else ""
            _print_outcome(seed, outcome, f"{description}{late}", folder)
    return summary


def _print_outcome(seed: int, outcome: ChaosOutcome, description: str, folder: Path) -> None:
    """Print the outcome of a plan whose files are in `folder` if it failed."""
    verdict = f"FAILED, files are in {folder / str(seed)}" if outcome.violations else "passed"
    sys.stdout.write(f"seed {seed}: {verdict} ({description})\n")
    for line in (*outcome.log_lines, *outcome.violations):
        sys.stdout.write(f"    {line}\n")
    sys.stdout.flush()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all chaos runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=20, help="number of runs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--within", type=float, default=120.0, help="timeout of a run in seconds")
    parser.add_argument("--folder", type=Path, help="directory for failed runs")
    parser.add_argument("--act", nargs=2, help=argparse.SUPPRESS)
    return parser


def run_from_command_line(
    options: argparse.Namespace, run: Callable[[range, Path], LiveChaosSummary]
) -> int:
    """Call `run(seeds, folder)`, print the summary and delete the directory unless a run failed.

    Returns the exit code: the number of failed runs, at most 99.
    """
    folder = options.folder or Path(tempfile.mkdtemp(prefix="spotfit-chaos-"))
    summary = run(range(options.start, options.start + options.seeds), folder)
    if not summary.failed_runs:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps(asdict(summary)) + "\n")
    return min(summary.failed_runs, 99)


# --- tools ------------------------------------------------------------------------------------


@contextlib.contextmanager
def faulty_store_proxy() -> Iterator[str]:
    """Run a store with a fault-injecting proxy in a process; yields its URL."""
    with subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-m", network_faults.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # The proxy prints its URL once it listens.
            yield process.stdout.readline().strip()
        finally:
            # The proxy ends with its standard input, also if this process is killed.
            process.stdin.close()


@contextlib.contextmanager
def environment_variables(values: dict[str, str]) -> Iterator[None]:
    """Replace the environment variables of this process."""
    before = env.copy_environment()
    env.replace_all(values)
    try:
        yield
    finally:
        env.replace_all(before)


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if there is none."""
    return path.read_text() if path.exists() else None
