"""Measure everything and write the table: .bench/results/summary.md.

Each figure is a separate command. They run one after the other, so that they do not disturb each
other.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import frameworks, tables
from benchmarks.measure import PAIRS, RESULTS

HERE = Path(__file__).resolve().parent
_SHARDED = ("--sharded", "--layers", "20", "--width", "2048")
CHECKPOINTER: dict[str, tuple[str, ...]] = {
    "saves_2": ("saves", "--ranks", "2"),
    "saves_4": ("saves", "--ranks", "4"),
    "saves_https": ("saves", "--ranks", "2", "--storage", "https"),
    "restores_4": ("restores", "--ranks", "4"),
    "restores_sharded": ("restores", "--ranks", "4", *_SHARDED),
    "recoveries_2": ("recoveries", "--ranks", "2"),
    "recoveries_throttled": ("recoveries", "--ranks", "2", "--layers", "80", "--gbit", "0.75"),
    "steps": ("steps", "--ranks", "2"),
    "ray": ("ray", "--ranks", "2", "--storage", "disk"),
}


def _checkpointer(name: str, *flags: str) -> tuple[str, ...]:
    named = ("--name", f"checkpointer_{name}", "--pairs", "{pairs}")
    return ("checkpointer.py", *flags, *named)


# Name of the result file: script and its flags.
FIGURES: dict[str, tuple[str, ...]] = {
    "fit_to_first_line": ("fit_to_first_line.py",),
    "fit_to_first_step": ("fit_to_first_step.py",),
    "second_fit": ("second_fit.py",),
    "worker_killed": ("worker_killed.py",),
    "worker_killed_early": ("worker_killed.py", "--early"),
    "worker_killed_often": ("worker_killed.py", "--count", "200"),
    "report_calls": ("report_calls.py",),
    "ddp_steps": ("ddp_steps.py",),
    "uploads_one": ("uploads.py", "--of", "one", "--pairs", "{pairs}"),
    "uploads_many": ("uploads.py", "--of", "many", "--pairs", "{pairs}"),
    **{
        f"frameworks_{name}": ("frameworks.py", "--of", name, "--pairs", "{pairs}")
        for name in frameworks.FIGURES
    },
    "node_killed": ("node_killed.py",),
    "simulated_scale": ("simulated_scale.py", "--agents", "1000"),
    **{f"checkpointer_{name}": _checkpointer(name, *flags) for name, flags in CHECKPOINTER.items()},
}


def main() -> int:
    args = arguments()
    failed = [name for name in args.only or FIGURES if not run_figure(name, args.pairs)]
    table = tables.summary([read_result(name) for name in FIGURES if result_path(name).exists()])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "summary.md").write_text(table)
    print("\n" + table)
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*FIGURES], help="only these figures")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    return parser.parse_args()


def run_figure(name: str, pairs: int) -> bool:
    script, *flags = FIGURES[name]
    flags_with_pairs = [flag.format(pairs=pairs) for flag in flags or ("--pairs", "{pairs}")]
    return (
        subprocess.run(
            [sys.executable, str(HERE / script), *flags_with_pairs], check=False
        ).returncode
        == 0
    )


def result_path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def read_result(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(result_path(name).read_text())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
