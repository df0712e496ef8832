"""A whole run from a client without what Windows or macOS lacks; its machines run on Linux."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.host import env
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.clouds.simulator import load_cloud
from tests.other_systems import run_python

URL = "s3://runs/run?endpoint_override={}&scheme=http"

FIT = """
import json, sys
from pathlib import Path

import spotfit
import own_module

cloud, storage = sys.argv[1:]


def trainer(fn, name):
    return spotfit.DataParallelTrainer(
        fn,
        train_loop_config={},
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(storage_path=storage, name=name),
        provisioner=cloud,
    )


def train_without_end(config):
    import time

    while True:
        time.sleep(0.1)


def train(config):
    import tempfile

    for step in range(1, 4):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights.txt").write_text(str(own_module.double(step)))
            print(f"worker at step {step} \\u2713")
            checkpoint = spotfit.Checkpoint.from_directory(folder)
            spotfit.report({"step": step}, checkpoint=checkpoint)
    return own_module.double(step)


result = trainer(train, "run").fit()
with result.checkpoint.as_directory() as folder:
    restored = Path(folder, "weights.txt").read_text()
copy = result.checkpoint.to_directory("copied")
copied = Path(copy, "weights.txt").read_text()
print("RESULT", json.dumps([result.return_value, result.metrics["step"], restored, copied]))

endless = trainer(train_without_end, "endless").submit()
endless.cancel("enough")
try:
    endless.result()
except spotfit.RunCancelledError:
    print("CANCELLED")
"""

OBSERVE = """
import sys

import spotfit
from spotfit.cli import main

url = sys.argv[1]
run = spotfit.attach(url)
assert run.status().state == "finished", run.status()
assert run.result().metrics == {"step": 3}
for command in ("status", "logs", "events", "metrics", "follow", "cancel", "checkpoints ls"):
    sys.argv = ["spotfit", *command.split(), url]
    try:
        main.main()
    except SystemExit as exit:
        assert not exit.code, (command, exit.code)
"""

TRAIN_LOCALLY = """
from pathlib import Path

import spotfit
from spotfit.torch import Checkpointer, TorchTrainer, prepare_model


def train(config):
    import torch

    model = prepare_model(torch.nn.Linear(2, 1))
    checkpointer = Checkpointer(model=model, every=1)
    for step in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        checkpointer.step({"step": step})
    Path("files").mkdir()
    Path("files/step.txt").write_text(str(step))
    spotfit.report({"step": step}, checkpoint=spotfit.Checkpoint.from_directory("files"))


result = TorchTrainer(train, scaling_config=spotfit.ScalingConfig(num_workers=0)).fit()
with result.checkpoint.as_directory() as folder:
    text = Path(folder, "step.txt").read_text()
copy = result.checkpoint.to_directory("copy")
print("RESULT", result.metrics["step"], text, Path(copy, "step.txt").read_text())
"""

USE_BACKENDS_FOR_UNIX = """
import spotfit

for backend in ("local", "slurm", "sim://aws_batch"):
    try:
        spotfit.DataParallelTrainer(print, provisioner=backend).fit()
    except spotfit.ConfigError as error:
        print("REFUSED", error)
"""


@pytest.fixture
def cloud(name: str, s3: str, tmp_path: Path) -> Iterator[SimProvisioner]:
    """A simulated cloud whose server and machines lack nothing and find the bucket of `s3`."""
    assert s3
    sim = SimProvisioner.with_options(
        cloud=name, root=str(tmp_path / "cloud"), boot_s=0.1, idle_s=60.0
    )
    sim.start_simulator()
    yield sim
    sim.call_simulator("leave")


@pytest.mark.parametrize(
    ("name", "system"), [("aws_batch", "win32"), ("kubernetes", "win32"), ("kubernetes", "darwin")]
)
def test_a_client_on_another_system_trains_and_observes(
    cloud: SimProvisioner, system: str, s3: str, tmp_path: Path
) -> None:
    access = load_cloud(cloud.options.cloud).client_access(cloud.start_simulator())
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    (laptop / "own_module.py").write_text("def double(number):\n    return 2 * number\n")
    environment = env.copy_environment() | {
        **access.environment,
        "HOME": str(laptop),
        "TMPDIR": str(laptop),
        # Redirected output of Windows.
        "PYTHONIOENCODING": "cp1252" if system == "win32" else "utf-8",
    }
    options = "".join(f"{key} = {json.dumps(value)}\n" for key, value in access.options.items())
    toml = f"# für alle\n[{cloud.options.cloud}]\n{options}"
    (laptop / "spotfit.toml").write_text(toml, encoding="utf-8")
    url = URL.format(s3.removeprefix("http://"))
    storage = url.replace("/run?", "?")

    fitted = run_python(
        system, FIT, cloud.options.cloud, storage, environment=environment, cwd=laptop
    )
    assert fitted.returncode == 0, fitted.stdout + fitted.stderr
    assert 'RESULT [6, 3, "6", "6"]' in fitted.stdout
    assert "CANCELLED" in fitted.stdout
    assert "worker at step 3" in fitted.stdout

    observed = run_python(system, OBSERVE, url, environment=environment, cwd=laptop)
    assert observed.returncode == 0, observed.stdout + observed.stderr
    assert "finished" in observed.stdout
    assert "worker at step 3" in observed.stdout
    assert "The run has ended already" in observed.stdout


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_local_mode_trains_on_another_system(system: str, tmp_path: Path) -> None:
    done = run_python(
        system,
        TRAIN_LOCALLY,
        environment=env.copy_environment() | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        imported_before=("torch.distributed.checkpoint.state_dict", "torch.utils.data"),
    )
    assert done.returncode == 0, done.stderr
    assert "RESULT 2 2 2" in done.stdout


def test_a_backend_for_unix_names_alternatives_on_windows(tmp_path: Path) -> None:
    done = run_python(
        "win32", USE_BACKENDS_FOR_UNIX, environment=env.copy_environment(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REFUSED") == 3, done.stdout
    assert done.stdout.count("does not run on this system (win32)") == 3, done.stdout
    assert done.stdout.count("WSL 2") == 3
    assert done.stdout.count("num_workers=0") == 3
