"""From a cold start of the program to the end of the first training step of 4 workers.

The clock starts when the program is executed and stops when the last rank has made its first step:
with the imports of torch, of the optimizer and of DDP, which the first step needs, on every side.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fit_to_first_line
from benchmarks.measure import PeerTarget, Reading, main
from benchmarks.peers import TORCHRUN, TORCHRUN_TUNED
from benchmarks.run_once import Run


def read(run: Run) -> Reading | None:
    found = fit_to_first_line.read(run)
    if found is None:
        return None
    step_s = found.more["first_step_s"]
    return Reading(
        step_s, run.started, run.started + step_s, {**found.more, "first_line_s": found.value}
    )


FIGURE = replace(
    fit_to_first_line.FIGURE,
    name="fit_to_first_step",
    title="fit() to the first step of all ranks, cold process, 4 workers",
    read=read,
    peer_targets=(PeerTarget(TORCHRUN_TUNED, target=2.5), PeerTarget(TORCHRUN, target=2.5)),
    also=(("first_line_s", "to the first line (s)"),),
)

if __name__ == "__main__":
    main(FIGURE)
