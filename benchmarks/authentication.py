"""Cost of the authentication of the journal: this tree against the commit before it, in pairs.

    python benchmarks/authentication.py --pairs 7

Each pair runs both trees one after the other, in alternating order, in processes of their own. The
other commits since then are part of the difference. A ratio above 1 means that this tree is slower.
"""

import argparse
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Appended: each side imports spotfit from its own tree.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.ratios import lower_bound, order

ROOT = Path(__file__).resolve().parents[1]
SUBJECT = "^Authenticate journal entries"
SOURCES = ("sdk", "provisioners", "localsim")
ENTRIES = 10_000
APPENDS = 1_000
REPORTS = 3_000
WARM_UP_REPORTS = 20
TIMEOUT_S = 300.0

FIGURES = {
    "replay_memory_us": "replay of 10,000 entries, memory store, CPU per entry (us)",
    "replay_file_us": "the same from a directory, CPU per entry (us)",
    "append_us": "append, memory store, CPU (us)",
    "report_us": "report() through an agent, median (us)",
    "reports_per_s": "report() back to back, calls per second",
    "first_line_s": "fit() to the first line of the function (s)",
    "restart_s": "SIGKILL of the worker to its next first line (s)",
}
HIGHER_IS_BETTER = ("reports_per_s",)


class Cost(NamedTuple):
    """How many times slower this tree is in one figure."""

    ratio: float
    lower: float
    upper: float

    @property
    def is_noise(self) -> bool:
        """Whether the 95 % interval of the ratio contains 1."""
        return self.lower <= 1.0 <= self.upper


def cost(ours: Sequence[float], before: Sequence[float], *, higher_is_better: bool) -> Cost:
    """Return the cost from paired values."""
    pairs = zip(ours, before, strict=True)
    ratios = [then / now if higher_is_better else now / then for now, then in pairs]
    # The interval is symmetric: the upper bound is the lower one of the negated ratios.
    return Cost(median(ratios), lower_bound(ratios), -lower_bound([-one for one in ratios]))


# --- one side, in a process with the sources of one tree ------------------------------------------


def measure_side() -> dict[str, float]:
    """Return all figures of the tree on the path of this process."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        figures["append_us"] = measure_append()
        for name, url in (("memory", "memory://replay/run"), ("file", f"file://{folder}/run")):
            figures[f"replay_{name}_us"] = measure_replay(url)
        return figures | measure_run(Path(folder))


def open_run(url: str) -> Any:
    """Return the ledger of an empty run, authenticated if the tree can do that."""
    from spotfit.ledger.journal import Ledger
    from spotfit.store.factory import open_store
    from spotfit.testing.builders import RUN_ID, an_agent_id

    store = open_store(url)
    try:
        from spotfit.ledger.authenticated_store import AuthenticatedStore
        from spotfit.testing.builders import RUN_KEY
    except ImportError:
        return Ledger(store, RUN_ID, an_agent_id(0))
    return Ledger(AuthenticatedStore(store, RUN_KEY), RUN_ID, an_agent_id(0))


def write_journal(ledger: Any, count: int) -> None:
    from spotfit.model.events import FitStarted, LeaderElected
    from spotfit.testing.builders import a_spec, an_agent_id

    view = ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    for n in range(1, count):
        leader = an_agent_id(n % 4)
        event = LeaderElected(leader=leader, epoch=n, coordinator_address="10.0.0.1:7000")
        view = ledger.append(event, after=view)


def measure_append() -> float:
    ledger = open_run("memory://append/run")
    started_at = time.process_time()
    write_journal(ledger, APPENDS)
    return (time.process_time() - started_at) / APPENDS * 1e6


def measure_replay(url: str) -> float:
    from spotfit.ledger.journal import Journal

    ledger = open_run(url)
    write_journal(ledger, ENTRIES)
    started_at = time.process_time()
    view = Journal(ledger.store, ignore_view_cache=True).catch_up()
    duration_s = time.process_time() - started_at
    assert view.next_slot == ENTRIES
    return duration_s / ENTRIES * 1e6


def measure_run(folder: Path) -> dict[str, float]:
    import spotfit

    # This file is no module of the side: its function must be pickled by value.
    train = functools.partial(train_and_die, folder=str(folder))
    trainer = spotfit.DataParallelTrainer(
        train,
        scaling_config=spotfit.ScalingConfig(num_workers=1),
        run_config=spotfit.RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=spotfit.FailureConfig(max_failures=1),
        ),
        provisioner="local",
    )
    called_at = time.time()
    trainer.fit()
    first, second = (json.loads((folder / f"{n}.json").read_text()) for n in (1, 2))
    return {
        "first_line_s": first["started_at"] - called_at,
        "restart_s": second["started_at"] - first["ended_at"],
        "report_us": median(first["report_us"]),
        "reports_per_s": len(first["report_us"]) / (sum(first["report_us"]) / 1e6),
    }


def train_and_die(folder: str) -> None:
    """Measure calls of `report`, then kill this worker; the second time return at once."""
    started_at = time.time()
    import spotfit

    def report(step: int) -> float:
        before = time.perf_counter()
        spotfit.report({"step": step})
        return (time.perf_counter() - before) * 1e6

    is_second = Path(folder, "1.json").exists()
    calls = 0 if is_second else REPORTS + WARM_UP_REPORTS
    report_us = [report(step) for step in range(calls)][WARM_UP_REPORTS:]
    times = {"started_at": started_at, "report_us": report_us, "ended_at": time.time()}
    Path(folder, f"{1 + is_second}.json").write_text(json.dumps(times))
    if not is_second:
        os.kill(os.getpid(), signal.SIGKILL)


# --- both sides -----------------------------------------------------------------------------------


def run_side(tree: Path) -> dict[str, float]:
    """Measure one tree in a new process."""
    with tempfile.TemporaryDirectory() as home:
        variables = {
            "PYTHONPATH": os.pathsep.join(str(tree / source) for source in SOURCES),
            "SPOTFIT_HOME": home,
        }
        completed = subprocess.run(  # our own file
            [sys.executable, __file__, "--side"],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
    figures: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return figures


def run_pairs(pairs: int, base: Path, log: Callable[[str], None]) -> list[str]:
    """Run all pairs after one discarded pair; return the lines of the table."""
    ours: list[dict[str, float]] = []
    before: list[dict[str, float]] = []
    for is_ours_first in [True, *order(pairs)]:
        sides = [(ROOT, ours), (base, before)]
        for tree, values in sides if is_ours_first else reversed(sides):
            values.append(run_side(tree))
        log(f"pair {len(ours) - 1}: {json.dumps([ours[-1], before[-1]])}")
    return [table_row(name, ours[1:], before[1:]) for name in FIGURES]


def table_row(
    name: str, ours: Sequence[dict[str, float]], before: Sequence[dict[str, float]]
) -> str:
    """Return one figure as a row of the table in README.md."""
    now, then = [one[name] for one in ours], [one[name] for one in before]
    found = cost(now, then, higher_is_better=name in HIGHER_IS_BETTER)
    noise = "within noise" if found.is_noise else ("slower" if found.ratio > 1 else "faster")
    return (
        f"| {FIGURES[name]} | {median(then):.3g} | {median(now):.3g} | {found.ratio:.2f} "
        f"({found.lower:.2f} to {found.upper:.2f}) | {noise} |"
    )


def extract_base(commit: str, folder: Path) -> None:
    """Write the sources of a commit to a folder."""
    archive = _git("archive", "--format=tar", commit, *SOURCES)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def find_base() -> str:
    """Return the commit before the first one of the authentication."""
    found = _git("log", "--reverse", "--format=%H", f"--grep={SUBJECT}").decode().split()
    if not found:
        sys.exit(f"No commit with the subject {SUBJECT!r}: name the base with --base COMMIT.")
    return f"{found[0]}^"


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments],  # noqa: S607  # git of the developer
        stdout=subprocess.PIPE,
        check=True,
    ).stdout


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        _print(json.dumps(measure_side()))
        return
    with tempfile.TemporaryDirectory() as folder:
        extract_base(options.base or find_base(), Path(folder))
        rows = run_pairs(options.pairs, Path(folder), _print)
    _print("| figure | before | now | ratio (95 % interval) | |\n|---|---|---|---|---|")
    _print("\n".join(rows))


if __name__ == "__main__":
    main()
