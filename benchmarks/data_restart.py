"""Time from SIGKILL of a training process to its first batch after the restart, in pairs.

One worker reads images and is killed in the middle of the epoch. spotfit continues at the next
row. torch's DataLoader under torchrun begins again and skips the batches of before, which it has to
read. Ray Train with Ray Data begins again and repeats them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import data, peers, process_tree, ratios, tables

RESULT = peers.BENCH / "results" / "data_restart.json"
PEERS = ("dataloader", "ray")
LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Restart:
    """One run of a side; a failed one counts as `LIMIT_S`."""

    side: str
    wall_s: float
    cpu_s: float
    """Of all processes of the side, in that time."""
    tail: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether there was no batch after the SIGKILL."""
        return bool(self.tail)


def run(side: str) -> Restart:
    """Kill and restart one side."""
    tag = uuid.uuid4().hex
    program = str(peers.SIDES / "data_restart.py")
    images = str(data.create_set("images"))
    python = str(peers.python_of(data.SIDES[side]))
    with tempfile.TemporaryDirectory(prefix="sfb-") as marks:
        command = [python, program, side, images, str(data.SETS["images"]), marks]
        variables = {**peers.RAY_TUNED.environment, "RAY_TMPDIR": marks}
        try:
            with process_tree.ProcessTree(tag) as tree:
                process = subprocess.run(
                    command,
                    env=data.environment_of(tag, variables),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
                tree.end(5.0)
        except subprocess.TimeoutExpired:
            return Restart(side, LIMIT_S, LIMIT_S, f"no end within {LIMIT_S:.0f} s")
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"killed"')]
    if process.returncode or not lines:
        return Restart(side, LIMIT_S, LIMIT_S, process.stdout[-2_000:] or "no output")
    times = json.loads(lines[-1])
    cpu_s = process_tree.between(tree.series, times["killed"], times["first"])
    return Restart(side, times["first"] - times["killed"], cpu_s)


def compare(peer: str, pairs: int) -> dict[str, Any]:
    """Run spotfit and a peer in pairs, after a discarded one; return the statistics."""
    measured = []
    for is_first in [True, *ratios.order(pairs)]:
        sides = ("spotfit", peer) if is_first else (peer, "spotfit")
        by_side = {side: _run_and_print(side) for side in sides}
        measured.append((by_side["spotfit"], by_side[peer]))
    return {
        "peer": peer,
        "pairs": pairs,
        "failed": sum(run.has_failed for pair in measured[1:] for run in pair),
        "wall_s": ratios.compare_costs(_values(measured[1:], "wall_s")),
        "cpu_s": ratios.compare_costs(_values(measured[1:], "cpu_s")),
        "runs": [asdict(run) for pair in measured for run in pair],
    }


def _values(pairs: list[tuple[Restart, Restart]], field: str) -> list[tuple[float, float]]:
    return [(getattr(ours, field), getattr(theirs, field)) for ours, theirs in pairs]


def _run_and_print(side: str) -> Restart:
    found = run(side)
    print(f"  {side:<12}{found.wall_s:>8.2f} s{found.cpu_s:>8.2f} CPU-s {found.tail}", flush=True)
    return found


def table(comparisons: list[dict[str, Any]]) -> str:
    """Return a Markdown table of comparisons. Pure."""
    rows = [
        (each["peer"], str(each["pairs"]), _cell(each["wall_s"]), _cell(each["cpu_s"]))
        for each in comparisons
    ]
    return tables.markdown(("peer", "pairs", "s to the first batch", "CPU s"), rows)


def _cell(compared: dict[str, float]) -> str:
    both = f"{compared['spotfit']:.2f} / {compared['peer']:.2f}"
    return f"{both}: {compared['ratio']:.1f}x ({compared['lower']:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    comparisons = [compare(peer, args.pairs) for peer in args.peers]
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine, "comparisons": comparisons}, indent=1))
    print("\n" + table(comparisons))


if __name__ == "__main__":
    main()
