"""Measure everything and write the table: .bench/results/summary.md.

Each figure is one command of its own; this runs them one after the other, so that nothing but the
two sides of a pair ever shares the machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.measure import PAIRS, RESULTS

HERE = Path(__file__).resolve().parent
_SHARDED = ("--sharded", "--layers", "20", "--width", "2048")
CHECKPOINTER: dict[str, tuple[str, ...]] = {
    "saves_2": ("saves", "--ranks", "2"),
    "saves_4": ("saves", "--ranks", "4"),
    "saves_https": ("saves", "--ranks", "2", "--storage", "https"),
    "restores_4": ("restores", "--ranks", "4"),
    "restores_sharded": ("restores", "--ranks", "4", *_SHARDED),
    "deaths_2": ("deaths", "--ranks", "2"),
    "deaths_wire": ("deaths", "--ranks", "2", "--layers", "80", "--gbit", "0.75"),
    "steps": ("steps", "--ranks", "2"),
    "ray": ("ray", "--ranks", "2", "--storage", "disk"),
}


def _checkpointer(name: str, *flags: str) -> tuple[str, ...]:
    named = ("--name", f"checkpointer_{name}", "--pairs", "{pairs}")
    return ("checkpointer.py", *flags, *named)


# By the name under which each is kept: the script, and what it is given besides --pairs.
FIGURES: dict[str, tuple[str, ...]] = {
    "fit_to_first_line": ("fit_to_first_line.py",),
    "second_fit": ("second_fit.py",),
    "worker_killed": ("worker_killed.py",),
    "worker_killed_often": ("worker_killed.py", "--count", "200"),
    "report_calls": ("report_calls.py",),
    "ddp_steps": ("ddp_steps.py",),
    "uploads_one": ("uploads.py", "--of", "one", "--pairs", "{pairs}"),
    "uploads_many": ("uploads.py", "--of", "many", "--pairs", "{pairs}"),
    "node_killed": ("node_killed.py",),
    "simulated_scale": ("simulated_scale.py", "--agents", "1000"),
    **{f"checkpointer_{name}": _checkpointer(name, *flags) for name, flags in CHECKPOINTER.items()},
}


def main() -> int:
    asked = arguments()
    failed = [name for name in asked.only or FIGURES if not measured(name, asked.pairs)]
    table = tables.summary([kept(name) for name in FIGURES if kept_at(name).exists()])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "summary.md").write_text(table)
    print("\n" + table)
    if failed:
        print(f"Not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*FIGURES], help="only these figures")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    return parser.parse_args()


def measured(name: str, pairs: int) -> bool:
    script, *flags = FIGURES[name]
    given = [flag.format(pairs=pairs) for flag in flags or ("--pairs", "{pairs}")]
    return subprocess.run([sys.executable, str(HERE / script), *given], check=False).returncode == 0


def kept_at(name: str) -> Path:
    return RESULTS / f"{name}.json"


def kept(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(kept_at(name).read_text())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
