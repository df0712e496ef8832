"""The sides of a comparison: how each is installed, started and tuned.

Peers have separate virtual environments under .bench/, created on first use. torch is requested
by version only, so that every side gets the same build.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / ".bench"
SIDES = ROOT / "benchmarks" / "sides"

TORCH = "torch==2.13.0"
FRAMEWORKS = (
    TORCH,
    "accelerate==1.15.0",
    "lightgbm==4.7.0",
    "lightning==2.6.6",
    "transformers==5.24.0",
    "xgboost-cpu==3.2.0",
)
_PINS = ("-c", str(ROOT / "constraints.txt"))
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (TORCH, "numpy"),
    "ray": (
        "ray[train]==2.60.0",
        *FRAMEWORKS,
        "jax==0.10.2",
        "tensorflow-cpu==2.21.0",
    ),
    # The sides of frameworks.py: no other frameworks, whose presence slows down imports.
    "ours-frameworks": (*FRAMEWORKS, *_PINS, "-e", str(ROOT)),
    "ray-frameworks": ("ray[train]==2.60.0", *FRAMEWORKS, *_PINS),
    # The sides of data.py; the first also runs spotfit.
    "data": (TORCH, "numpy", "pyarrow==26.0.1", "pillow", "-e", str(ROOT)),
    "data-ray": ("ray[data,train]==2.60.0", TORCH, "pillow"),
    "data-huggingface": ("datasets==5.2.0", "s3fs", TORCH, "pillow"),
    "data-streaming": ("mosaicml-streaming==0.13.0", TORCH, "pillow", "pyarrow==26.0.1"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One side with its settings."""

    side: str
    choice: str
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    init: Mapping[str, Any] = field(default_factory=dict)
    venv: str = ""
    """The environment, by its name in `REQUIREMENTS`; empty: that of the side."""

    @property
    def name(self) -> str:
        return self.side if self.side == "ours" else f"{self.side}-{self.choice}"


OURS = Setting("ours", "default")
TORCHRUN = Setting("torchrun", "default")
# Its default store keeps addresses of killed workers: about half of the restarts hang or fail.
TORCHRUN_TUNED = Setting(
    "torchrun",
    "tuned",
    environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    flags=("--monitor-interval", "0.1"),
)
RAY = Setting("ray", "default")
# By default its controller checks the workers every two seconds.
RAY_TUNED = Setting(
    "ray",
    "tuned",
    environment={"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"},
    init={"include_dashboard": False},
)
OURS_FRAMEWORKS = replace(OURS, venv="ours-frameworks")
# Ray starts workers at niceness 15, which is unfair on a machine with other load.
RAY_FRAMEWORKS = replace(
    RAY_TUNED,
    environment={**RAY_TUNED.environment, "RAY_worker_niceness": "0"},
    venv="ray-frameworks",
)
SETTINGS = {setting.name: setting for setting in (OURS, TORCHRUN, TORCHRUN_TUNED, RAY, RAY_TUNED)}


def command(setting: Setting, job: Mapping[str, Any]) -> list[str]:
    """Return the command; the clock starts when it is executed, on every side."""
    python = str(python_of(setting.venv or setting.side))
    text = json.dumps(dict(job) | {"init": dict(setting.init)})
    if setting.side == "torchrun":
        return [*_torchrun(python, setting, job), str(SIDES / "torchrun.py"), text]
    program = {"ours": "ours.py", "ray": "ray_train.py"}[setting.side]
    return [python, str(SIDES / program), text]


def _torchrun(python: str, setting: Setting, job: Mapping[str, Any]) -> list[str]:
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(job["workers"]),
        "--max-restarts",
        str(job["max_failures"]),
        *setting.flags,
    ]


def environment(setting: Setting) -> dict[str, str]:
    """Return the environment of a side: one thread per worker, no usage reports, its tuning."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep) if setting.side == "ours" else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, given)]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **setting.environment,
    }


def python_of(side: str) -> Path:
    """Return the interpreter of a side; a peer is installed on the first call."""
    if side == "ours":
        return Path(sys.executable)
    folder = BENCH / f"venv-{side}"
    stamp, requirements = folder / ".installed", "\n".join(REQUIREMENTS[side])
    if not stamp.exists() or stamp.read_text() != requirements:
        _install(folder, REQUIREMENTS[side])
        stamp.write_text(requirements)
    return folder / "bin" / "python"


def _install(folder: Path, requirements: tuple[str, ...]) -> None:
    print(f"Installing {', '.join(requirements)} into {folder.relative_to(ROOT)} …", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *requirements], check=True)


def main() -> None:
    for side in REQUIREMENTS:
        print(f"{side}: {python_of(side)}")


if __name__ == "__main__":
    main()
