"""Preloaded frameworks: the fork server stays safe to fork, and forked processes train.

Each framework trains in four processes forked after its import, which must give equal results and
import almost nothing themselves. Each test runs in a new interpreter, as a fork server does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from spotfit.client.preload import SAFE_PACKAGES, find_preload_modules
from spotfit.fork_server.fork_client import build_worker_environment
from tests.frameworks.small_trainings import TRAININGS

CHILDREN = 4
# A first step that imports its framework costs 1.2 s (LightGBM) to 6 s (Lightning) of CPU time.
MAX_CPU_S = 1.0
# JAX compiles each function of a first step.
MAX_COMPILE_CPU_S = {"jax": 2.0}
PROGRAM = """
import json, os, resource, sys
from spotfit.fork_server import child_setup, server
from spotfit.host import process
from tests.frameworks import small_trainings

framework, function, children, *preload = sys.argv[1:]
for module in server.plan_imports(framework, preload):
    server._try_import(module)
print(json.dumps([server._fork_hazard(), process.thread_count()]), flush=True)
for _ in range(int(children)):
    if os.fork() == 0:
        child_setup.reseed()
        result = getattr(small_trainings, function)()
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([result, used.ru_utime + used.ru_stime]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
HAZARD_PROGRAM = """
import importlib, sys
from spotfit.fork_server import server
importlib.import_module(sys.argv[1])
print("\\n" + server._fork_hazard())
"""


@pytest.mark.parametrize("package", TRAININGS)
def test_processes_that_are_forked_after_the_import_train(package: str) -> None:
    _require(package)
    assert package in SAFE_PACKAGES
    framework, function = TRAININGS[package]
    preload = find_preload_modules(function)
    assert any(module.startswith(package) for module in preload)
    completed = _run(PROGRAM, framework, function.__name__, str(CHILDREN), *preload)
    assert completed.returncode == 0, completed.stderr
    lines = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("[")]
    (hazard, threads), *children = lines
    assert (hazard, threads) == ("", 1)
    results = [result for result, _ in children]
    assert results == [results[0]] * CHILDREN
    assert results[0]
    assert max(cpu_s for _, cpu_s in children) < MAX_CPU_S + MAX_COMPILE_CPU_S.get(package, 0.0)


@pytest.mark.parametrize(
    ("library", "use"),
    [
        ("jax", "import jax.numpy; jax.numpy.ones(3).sum().block_until_ready()"),
        ("tensorflow", "import tensorflow; tensorflow.ones(3) + 1"),
    ],
)
def test_a_library_that_was_used_before_the_fork_is_rejected(
    library: str, use: str, tmp_path: Path
) -> None:
    _require(library)
    (tmp_path / "computes_on_import.py").write_text(use)
    imported, used = (
        _run(HAZARD_PROGRAM, module, path=tmp_path).stdout.splitlines()[-1]
        for module in (library, "computes_on_import")
    )
    assert imported == ""
    assert "threads" in used


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; see the Makefile")


def _run(program: str, *arguments: str, path: Path | None = None) -> CompletedProcess[str]:
    """Run the program in a new interpreter with the environment of a fork server."""
    root = Path(__file__).parents[2]
    # Two slots: as on a machine with several workers, with one OpenMP thread each.
    environment = {**os.environ, **build_worker_environment(2, {})}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**environment, "PYTHONPATH": f"{root}:{path or root}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
