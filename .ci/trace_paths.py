"""Count the files that take part in a report's commit, a save and a restore: `make trace-paths`.

Runs a small job with two workers on two local nodes while every process records the functions of
the SDK that it enters. A file counts for a phase if one of its functions is entered during the
phase and was not entered in the second before it, when the run was idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("report", "save", "restore")
_IDLE_S = 1.0

# Runs at the start of every interpreter, because its folder is on PYTHONPATH.
_RECORDER = """
import os, sys, threading, time
_folder, _sdk = os.environ.get("SPOTFIT_TRACE_FOLDER"), os.environ.get("SPOTFIT_TRACE_SDK")
_seen = {}
def _record(frame, event, argument):
    if event != "call" or not frame.f_code.co_filename.startswith(_sdk):
        return
    now = time.monotonic()
    key = (os.getpid(), frame.f_code.co_filename, frame.f_code.co_qualname)
    if now - _seen.get(key, -1.0) < 0.2:
        return
    _seen[key] = now
    with open(f"{_folder}/{os.getpid()}.calls", "a") as file:
        file.write(f"{now} {key[1]} {key[2]}\\n")
if _folder:
    threading.setprofile(_record)
    sys.setprofile(_record)
"""

_JOB = """
import json, os, sys, tempfile, time
import torch
import spotfit
from spotfit.torch import Checkpointer, TorchTrainer, prepare_model

def mark(phase, moment):
    if spotfit.get_context().get_world_rank() == 0:
        with open(os.environ["PHASES_FILE"], "a") as file:
            file.write(json.dumps([phase, moment, time.monotonic()]) + "\\n")

def settle():
    spotfit.collective.barrier()
    time.sleep(2.5)

def train():
    model = prepare_model(torch.nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer, every=10**9)
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    settle()
    mark("report", "start")
    with tempfile.TemporaryDirectory() as folder:
        open(f"{folder}/weights-{spotfit.get_context().get_world_rank()}", "w").write("x")
        spotfit.report({"a": 1}, checkpoint=spotfit.Checkpoint.from_directory(folder))
        spotfit.get_all_reported_checkpoints()
    mark("report", "end")
    settle()
    mark("save", "start")
    checkpointer.step()
    checkpointer.save()
    spotfit.get_all_reported_checkpoints()
    mark("save", "end")
    settle()
    mark("restore", "start")
    checkpointer.restore()
    mark("restore", "end")
    settle()

if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(name="trace", storage_path=sys.argv[1]),
        provisioner=f"local?nodes=2&root={sys.argv[1]}/machines",
    ).fit()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run_job(folder)
        calls, phases = _read_calls(folder), _read_phases(folder)
    for phase in PHASES:
        start, end = phases[phase, "start"], phases[phase, "end"]
        idle = {key for moment, key in calls if start - _IDLE_S <= moment < start}
        entered = {key for moment, key in calls if start <= moment <= end} - idle
        files = {file for file, _ in entered}
        packages = sorted({file.split("/")[0] for file in files})
        print(f"{phase}: {len(files)} files, {len(entered)} functions, {len(packages)} packages")
        if "--files" in sys.argv:
            print(*(f"    {file}" for file in sorted(files)), sep="\n")
    return 0


def _run_job(folder: Path) -> None:
    (folder / "recorder").mkdir()
    (folder / "calls").mkdir()
    (folder / "recorder" / "sitecustomize.py").write_text(_RECORDER)
    (folder / "job.py").write_text(_JOB)
    path = [str(folder / "recorder"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SPOTFIT_TRACE_FOLDER": str(folder / "calls"),
        "SPOTFIT_TRACE_SDK": str(ROOT / "sdk" / "spotfit"),
        "PHASES_FILE": str(folder / "phases"),
    }
    command = [sys.executable, str(folder / "job.py"), str(folder / "runs")]
    subprocess.run(command, env=environment, check=True, timeout=240)  # noqa: S603 - our own job


def _read_calls(folder: Path) -> list[tuple[float, tuple[str, str]]]:
    prefix = f"{ROOT}/sdk/spotfit/"
    return [
        (float(moment), (file.removeprefix(prefix), function))
        for path in (folder / "calls").glob("*.calls")
        for line in path.read_text().splitlines()
        for moment, file, function in [line.split(" ", 2)]
    ]


def _read_phases(folder: Path) -> dict[tuple[str, str], float]:
    lines = (folder / "phases").read_text().splitlines()
    return {(phase, moment): time_s for phase, moment, time_s in map(json.loads, lines)}


if __name__ == "__main__":
    sys.exit(main())
