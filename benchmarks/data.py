"""Read a data set once, in CPU seconds: spotfit.data against other loaders, in pairs.

Each side reads the same Parquet files from a disk, or from S3 behind a delay of 30 ms per request,
and yields shuffled batches of tensors on one rank. The figures are rows per CPU second of all its
processes, CPU seconds to the first batch, both from the end of the imports on, and the largest
proportional set size of the processes.
"""

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bucket, peers, process_tree, ratios, run_once, tables

RESULT = peers.BENCH / "results" / "data.json"
SETS = {"tables": 256, "text": 64, "images": 64}
"""Rows of a batch, by data set."""
SIDES = {
    "spotfit": "data",
    "dataloader": "data",
    "ray": "data-ray",
    "huggingface": "data-huggingface",
    "streaming": "data-streaming",
    "feeders": "data",
    "cache": "data",
}
"""The environment of each side."""
PEERS = ("dataloader", "ray", "huggingface", "streaming")
EPOCHS = {"first epoch": 0, "second epoch": 1, "restart": 0}
"""Passes before the one that is measured. Only the first process finds no files of a cache."""
FEEDERS = (0, 1, 4)
"""Numbers of feeder processes beside the training loop."""
S3_DELAY_MS = 30.0
LIMIT_S = 600.0
PSS_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of a side. `reading` is what it printed; {} if it failed."""

    side: str
    reading: dict[str, Any]
    peak_pss_bytes: int
    processes: int
    pressure: float
    """As in `run_once.Run`: percent, the larger one of before and after the run."""
    tail: str

    @property
    def rows_per_cpu_s(self) -> float:
        return float(self.reading["rows"] / self.reading["cpu_s"])

    @property
    def first_cpu_s(self) -> float:
        # The clock of the kernel has ticks of 10 ms.
        return max(float(self.reading["first_cpu_s"]), 0.01)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────


def run(side: str, name: str, storage: str = "disk") -> SideRun:
    """Read a data set once with one side."""
    folder = shards_of(name) if side == "streaming" else create_set(name)
    location, variables = str(folder), dict[str, str]()
    if storage == "s3":
        delayed = _delayed_server(folder)
        location, variables = delayed.url_of(f"data/{folder.name}"), delayed.environment
    return _execute(side, (name, location, str(SETS[name])), variables)


def _execute(side: str, arguments: tuple[str, ...], variables: Mapping[str, str]) -> SideRun:
    """Run the program of a side, and read the line of JSON that it prints."""
    program = str(peers.SIDES / f"data_{side}.py")
    command = [str(peers.python_of(SIDES[side])), program, *arguments]
    tag = uuid.uuid4().hex
    environment = environment_of(tag, variables)
    pressure = run_once.cpu_pressure()
    with process_tree.ProcessTree(tag) as tree, _PeakMemory(tree) as memory:
        process = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        tree.end(5.0)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"rows"')]
    reading = json.loads(lines[-1]) if lines and not process.returncode else {}
    tail = "" if reading else process.stdout[-2_000:]
    pressure = max(pressure, run_once.cpu_pressure())
    return SideRun(side, reading, memory.peak_bytes, tree.processes, pressure, tail)


def environment_of(tag: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a side: that of this process, its tag, and `variables`."""
    return {
        **os.environ,
        **variables,
        process_tree.TAG: tag,
        "PYTHONPATH": str(peers.ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def _delayed_server(folder: Path) -> bucket.Server:
    """Return a server with the files of a data set."""
    server = bucket.server()
    server.upload(folder, f"data/{folder.name}")
    return bucket.with_delay(server, S3_DELAY_MS)


def create_set(name: str) -> Path:
    """Return the folder of a data set, which is written on the first call."""
    folder = peers.BENCH / "data"
    if not (folder / name).exists():
        program = str(peers.ROOT / "benchmarks" / "data_sets.py")
        subprocess.run([str(peers.python_of("data")), program, name, str(folder)], check=True)
    return folder / name


def shards_of(name: str) -> Path:
    """Return the folder of a data set as MDS shards, which are written on the first call."""
    files = create_set(name)
    shards = files.with_name(f"{name}-mds")
    if not (shards / "index.json").exists():
        command = [str(peers.python_of(SIDES["streaming"])), str(peers.SIDES / "data_streaming.py")]
        arguments = ["write", name, str(files), str(shards)]
        subprocess.run([*command, *arguments], env=environment_of("", {}), check=True)
    return shards


class _PeakMemory:
    """Samples the proportional set size of all processes of a tree."""

    def __init__(self, tree: process_tree.ProcessTree) -> None:
        self.peak_bytes = 0
        self._tree = tree
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(PSS_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, self._tree.alive())))


def pss_bytes(process_id: int) -> int:
    """Return the proportional set size of a process; 0 if it has exited."""
    try:
        rollup = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(
        int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")
    )


# ── pairs ─────────────────────────────────────────────────────────────────────────────────────────


def compare(name: str, peer: str, pairs: int, storage: str = "disk") -> dict[str, Any]:
    """Run spotfit and a peer in pairs, after a discarded one; return the statistics."""
    print(f"{name}: spotfit against {peer}", flush=True)
    measured = []
    for is_first in [True, *ratios.order(pairs)]:
        sides = ("spotfit", peer) if is_first else (peer, "spotfit")
        by_side = {side: _run_and_print(side, name, storage) for side in sides}
        measured.append((by_side["spotfit"], by_side[peer]))
    complete = [pair for pair in measured[1:] if all(run.reading for run in pair)]
    return {
        "set": name if storage == "disk" else f"{name}, {storage}",
        "peer": peer,
        "pairs": len(complete),
        "failed": pairs - len(complete),
        "pressure": [
            median(pair[side].pressure for pair in complete) if complete else 0.0
            for side in range(2)
        ],
        **(_ratios(complete) if complete else {}),
        "runs": [asdict(run) for pair in measured for run in pair],
    }


def _ratios(pairs: list[tuple[SideRun, SideRun]]) -> dict[str, Any]:
    def compared(of: Any, *, more_is_better: bool) -> dict[str, float]:
        verdict = ratios.verdict(
            [
                ratios.times_better(of(ours), of(theirs), more_is_better=more_is_better)
                for ours, theirs in pairs
            ]
        )
        return {
            "spotfit": median(of(ours) for ours, _ in pairs),
            "peer": median(of(theirs) for _, theirs in pairs),
            "ratio": verdict.median,
            "lower": verdict.lower,
        }

    return {
        "rows_per_cpu_s": compared(lambda run: run.rows_per_cpu_s, more_is_better=True),
        "first_cpu_s": compared(lambda run: run.first_cpu_s, more_is_better=False),
        "peak_pss_bytes": compared(lambda run: run.peak_pss_bytes, more_is_better=False),
    }


def _run_and_print(side: str, name: str, storage: str) -> SideRun:
    found = run(side, name, storage)
    if not found.reading:
        print(f"  {side:<12} FAILED: {found.tail[-600:]}", flush=True)
        return found
    print(
        f"  {side:<12}{found.rows_per_cpu_s:>10,.0f} rows/CPU-s"
        f"{found.reading['cpu_s']:>8.2f} CPU-s in {found.reading['wall_s']:.1f} s, "
        f"first {found.first_cpu_s:.2f} in {found.reading['first_s']:.1f} s"
        f"{found.peak_pss_bytes / 1e6:>7.0f} MB in {found.processes} processes"
        f"  pressure {found.pressure:.0f} %",
        flush=True,
    )
    return found


def _run_feeders(processes: int) -> None:
    arguments = (str(processes), str(create_set("images")), str(SETS["images"]))
    found = _execute("feeders", arguments, {})
    print(f"  {processes} feeders: {found.reading or found.tail[-600:]}", flush=True)


def compare_cache(name: str, pairs: int) -> dict[str, Any]:
    """Read from S3 with and without a cache, in pairs after a discarded one.

    Measured are the first epoch, the second one, and the first one of another process.
    """
    print(f"{name}, s3: with and without a cache", flush=True)
    measured = []
    for is_first in [True, *ratios.order(pairs)]:
        with tempfile.TemporaryDirectory(dir=peers.BENCH) as directory:
            order = (directory, "") if is_first else ("", directory)
            by_directory = {one: _run_epochs(name, one) for one in order}
        measured.append((by_directory[directory], by_directory[""]))
    return {
        f"{epoch}, {field}": ratios.compare_costs(
            _seconds([pair[number] for pair in pairs_of], field)
        )
        for number, epoch in enumerate(EPOCHS)
        for field in ("wall_s", "cpu_s", "first_s")
        for pairs_of in [[list(zip(*pair, strict=True)) for pair in measured[1:]]]
    }


def _run_epochs(name: str, directory: str) -> list[SideRun]:
    """Run `EPOCHS`, each in a process of its own."""
    server = _delayed_server(create_set(name))
    arguments = (name, server.url_of(f"data/{name}"), str(SETS[name]), directory)
    runs = []
    for epoch, passes in EPOCHS.items():
        found = _execute("cache", (*arguments, str(passes)), server.environment)
        kind = "cache" if directory else "no cache"
        print(f"  {kind:<10}{epoch:<14}{found.reading or found.tail[-600:]}", flush=True)
        runs.append(found)
    return runs


def _seconds(pairs: list[tuple[SideRun, SideRun]], field: str) -> list[tuple[float, float]]:
    # The clock of the kernel has ticks of 10 ms.
    return [(max(ours.reading[field], 0.01), theirs.reading[field]) for ours, theirs in pairs]


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def table(comparisons: list[dict[str, Any]]) -> str:
    """Return a Markdown table of comparisons. Pure."""
    rows = [
        (
            each["set"],
            each["peer"],
            str(each["pairs"]),
            *(_cell(each[key], scale) for key, scale in _COLUMNS.values()),
            " / ".join(f"{percent:.0f}" for percent in each["pressure"]),
        )
        for each in comparisons
        if each["pairs"]
    ]
    return tables.markdown(("data", "peer", "pairs", *_COLUMNS, "CPU pressure (%)"), rows)


_COLUMNS = {
    "rows per CPU second": ("rows_per_cpu_s", 1.0),
    "CPU s to the first batch": ("first_cpu_s", 1.0),
    "memory (MB)": ("peak_pss_bytes", 1e-6),
}


def _cell(compared: dict[str, float], scale: float) -> str:
    ours, theirs = compared["spotfit"] * scale, compared["peer"] * scale
    return f"{ours:,.3g} / {theirs:,.3g}: {compared['ratio']:.1f}x ({compared['lower']:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--storage", default="disk", choices=["disk", "s3"])
    parser.add_argument("--alone", choices=("spotfit", *PEERS), help="one side, without pairs")
    parser.add_argument("--feeders", action="store_true", help="0, 1 and 4 feeders, on images")
    parser.add_argument("--cache", action="store_true", help="with and without a cache, from S3")
    args = parser.parse_args()
    if args.cache:
        found = {name: compare_cache(name, args.pairs) for name in args.sets}
        for name, figures in found.items():
            for figure, compared in figures.items():
                print(f"{name}, {figure}: {_cell(compared, 1.0)}")
        return
    if args.feeders:
        for _ in range(args.pairs):
            for processes in FEEDERS:
                _run_feeders(processes)
        return
    if args.alone:
        for name in args.sets:
            print(name)
            for _ in range(args.pairs):
                _run_and_print(args.alone, name, args.storage)
        return
    comparisons = []
    for peer in args.peers:
        for name in args.sets:
            comparisons.append(compare(name, peer, args.pairs, args.storage))
            _write(comparisons)
    print("\n" + table(comparisons))


def _write(comparisons: list[dict[str, Any]]) -> None:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    RESULT.write_text(json.dumps({"machine": machine, "comparisons": comparisons}, indent=1))


if __name__ == "__main__":
    main()
