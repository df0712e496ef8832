"""`make parity`: run Ray Train's examples with spotfit, and compare the tables with Ray's wheels.

Ray is installed into .bench/venv-ray, as for the benchmarks. Its examples are migrated by
`python -m spotfit.migrate` and run with spotfit. torchvision and tqdm, which they import, are
installed into a separate folder without dependencies, to use our torch. A torchvision for another
torch lacks its compiled operators, which the examples do not use.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import BENCH, ROOT, python_of
from tests.parity.digits import fashion_mnist_at
from tests.parity.scope import V1_VERSION

WORK_DIR = BENCH / "parity"
PACKAGES = BENCH / "parity-packages"
REQUIREMENTS = ("torchvision==0.28.0", "pillow", "tqdm")
TABLE = ROOT / "tests" / "parity" / "ray_train_2_60.json"
V1_TABLE = TABLE.with_name("ray_train_2_6.json")
BEHAVIOR_TABLE = TABLE.with_name("behaviour_ray_2_60.json")
FAST_RAY_ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_USAGE_STATS_ENABLED": "0"}
DATASET_DIR = Path("/tmp/data")  # noqa: S108 - where one of the examples looks for them
TIMEOUT_S = 600
REMOTE_ROWS = "s3://anonymous@air-example-data/regression.csv"
"""Examples read it, and get a local file of the same columns instead."""
DECLARE_OPERATORS = """\
import torch
_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Operators that torchvision needs on import, even without its compiled part."""


@dataclass(frozen=True, slots=True)
class RayExample:
    """One example of Ray: how it is run, and its expected output."""

    script: str
    arguments: Sequence[str] = ()
    call: str = ""
    expected_output: str = ""
    needs_gpu: bool = False
    environment: str = ""
    """Environment of `make` in .bench that runs it; '' for that of the tests."""


EXAMPLES = (
    RayExample("pytorch/torch_quick_start.py", expected_output="epoch: 2, loss:"),
    RayExample(
        "pytorch/torch_linear_example.py", arguments=("--smoke-test",), expected_output="{'loss':"
    ),
    RayExample(
        "pytorch/torch_fashion_mnist_example.py",
        # The script requests four GPUs; this calls its function with two CPUs.
        call="train_fashion_mnist(num_workers=2, use_gpu=False)",
        expected_output="Training result: Result(",
    ),
    RayExample(
        "pytorch/torch_data_prefetch_benchmark/auto_pipeline_for_host_to_device_data_transfer.py",
        expected_output="Finished the torch data prefetch benchmark with auto pipeline",
        needs_gpu=True,
    ),
    RayExample(
        "pytorch/torch_regression_example.py",
        arguments=("--smoke-test",),
        expected_output="Result(metrics={'loss':",
    ),
    RayExample(
        "tf/tensorflow_regression_example.py",
        arguments=("--smoke-test",),
        expected_output="Result(",
        environment="tensorflow",
    ),
)


def main() -> None:
    shutil.rmtree(WORK_DIR, ignore_errors=True)
    failures = [
        *table_differences(TABLE, [str(python_of("ray")), "-m", "tests.parity.make_table"]),
        *table_differences(
            V1_TABLE, [sys.executable, "-m", "tests.parity.make_v1_table", str(v1_wheel())]
        ),
        *behaviour_differences(python_of("ray")),
    ]
    _install_packages()
    examples = WORK_DIR / "examples"
    shutil.copytree(_ray_directory() / "train" / "examples", examples)
    write_regression_rows(WORK_DIR / "regression.csv")
    with ExitStack() as image_files:
        for root in (DATASET_DIR, WORK_DIR / "home" / "data"):
            image_files.enter_context(fashion_mnist_at(root))
        for example in EXAMPLES:
            print(f"── {example.script}", flush=True)
            failures += _run_example(example, examples)
    for failure in failures:
        print(f"FAILED {failure}")
    sys.exit(bool(failures))


def table_differences(table: Path, command: list[str]) -> list[str]:
    """Create a table; return its difference from the stored one."""
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = table.read_text()
    sys.stdout.writelines(difflib.unified_diff(kept.splitlines(True), made.splitlines(True)))
    return [] if made == kept else [f"{table.name} is not what Ray's wheel says"]


def v1_wheel() -> Path:
    """Download the wheel of the last version with the V1 names, once; it is not installed."""
    folder = BENCH / f"ray-{V1_VERSION}"
    if not list(folder.glob("ray-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), f"ray=={V1_VERSION}"], check=True)
    return next(folder.glob("ray-*.whl"))


def behaviour_differences(ray_python: Path) -> list[str]:
    """Run all probes with Ray; return the results that differ from the stored ones."""
    print(
        "── Ray Train answers the probes of tests/parity/behaviour.py (some ten minutes)",
        flush=True,
    )
    probe_dir = WORK_DIR / "probes"
    command = [str(ray_python), "-m", "tests.parity.behaviour", "ray.train", str(probe_dir)]
    environment = _environment() | FAST_RAY_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    seen = json.loads((probe_dir / "seen.json").read_text())
    kept = json.loads(BEHAVIOR_TABLE.read_text())
    return [
        f"Ray answers {name} differently: {seen[name]}" for name in kept if seen[name] != kept[name]
    ]


def _run_example(example: RayExample, examples: Path) -> list[str]:
    script = examples / example.script
    if problem := _migrate(example, script):
        return [problem]
    script.write_text(script.read_text().replace(REMOTE_ROWS, str(WORK_DIR / "regression.csv")))
    folder = BENCH / f"venv-{example.environment}"
    python = folder / "bin" / "python" if example.environment else Path(sys.executable)
    if not python.exists():
        print(f"moved; not run: `make {example.environment}` installs its environment")
        return []
    if example.needs_gpu and not torch.cuda.is_available():
        print("moved; not run: it needs a GPU")
        return []
    done = subprocess.run(
        [str(python), *_example_command(example, script)],
        cwd=script.parent,
        # Its packages belong to the environment of the tests.
        env=_environment() | ({"PYTHONPATH": ""} if example.environment else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print("\n".join(done.stdout.splitlines()[-3:]))
    succeeded = done.returncode == 0 and example.expected_output in done.stdout
    if not succeeded:
        print(done.stdout)
    return [] if succeeded else [f"{example.script} ended with {done.returncode}"]


def _migrate(example: RayExample, script: Path) -> str:
    """Migrate the script; return what the tool could not do, '' if that is nothing."""
    command = [sys.executable, "-m", "spotfit.migrate", "--write", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout.strip())
    if result.returncode:
        return f"{example.script} was not moved as expected: {result.stdout}{result.stderr}"
    return ""


def _example_command(example: RayExample, script: Path) -> list[str]:
    if example.call:
        return ["-c", f"import {script.stem} as example; example.{example.call}"]
    return [str(script), *example.arguments]


def write_regression_rows(path: Path) -> None:
    """Write rows with the columns of `REMOTE_ROWS`: y is a linear function of x000 to x099."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 100))
    y = x @ generator.normal(size=100)
    header = ",".join([*(f"x{column:03d}" for column in range(100)), "y"])
    np.savetxt(path, np.column_stack([x, y]), delimiter=",", header=header, comments="", fmt="%.6f")


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(WORK_DIR / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PACKAGES),
    }


def _ray_directory() -> Path:
    command = [str(python_of("ray")), "-c", "import ray; print(ray.__path__[0])"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(result.stdout.strip())


def _install_packages() -> None:
    if (PACKAGES / ".installed").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(PACKAGES), *REQUIREMENTS], check=True)
    importing = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(importing, env=_environment(), capture_output=True, check=False).returncode:
        print("torchvision was built for another torch: declaring what it looks for in it.")
        first = PACKAGES / "torchvision" / "__init__.py"
        first.write_text(DECLARE_OPERATORS + first.read_text())
    (PACKAGES / ".installed").touch()


if __name__ == "__main__":
    main()
