"""Each test of this directory is a row of `make gpu`, and a smoke test on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import GpuFigure
from spotfit_provisioners.local.state_dir import LocalCloudDir
from tests.live.cloud import LiveTestCloud, end_waiting_machines

Measure = Callable[..., None]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of the workers. On the CPU the scenario runs, and goals are not checked."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    return str(request.param)


@pytest.fixture
def measure(device: str, record_property: Callable[[str, object], None]) -> Measure:
    """Record a figure for the table, and fail if it misses its goal on a GPU."""

    def measure(name: str, value: float, unit: str = "", *, at_most: float | None = None) -> None:
        figure = GpuFigure(name, value, unit, at_most)
        record_property("figure", asdict(figure))
        assert figure.is_met or device == "cpu", f"{figure}; the goal is {figure.goal}"

    return measure


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloudDir]:
    """A local cloud whose machines wait for the next test."""
    root = LocalCloudDir(tmp_path_factory.mktemp("machines") / "cloud")
    yield root
    end_waiting_machines(root)


@pytest.fixture
def cloud(
    tmp_path: Path, shared_root: LocalCloudDir, request: pytest.FixtureRequest
) -> Iterator[LiveTestCloud]:
    """Agents and workers of this machine, and a bucket, for one test.

    On a GPU every test has new machines, so that its figures do not depend on the tests before.
    """
    is_on_cpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cpu"
    cloud = LiveTestCloud(tmp_path, shared_root if is_on_cpu else None)
    yield cloud
    cloud.close()
