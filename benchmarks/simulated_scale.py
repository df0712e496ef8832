"""1,000 agents in virtual time, a tenth of them preempted every minute, and the cost of requests.

The production code in simulated time. Arguments are those of
`python -m spotfit_localsim.virtual.scale`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, machine

NAME = "simulated_scale"


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "spotfit_localsim.virtual.scale", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    write_result(done.stdout, passed=done.returncode == 0, took_s=time.monotonic() - began)
    return done.returncode


def write_result(output: str, *, passed: bool, took_s: float) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "figure": NAME,
        "title": "1,000 simulated agents, a tenth reclaimed a minute (virtual time)",
        "machine": machine(),
        "comparisons": [],
        "alone": None,
        "output": " ".join(output.split()),
        "passed": passed,
        "took_s": took_s,
    }
    (RESULTS / f"{NAME}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
