"""Each test of this directory is a row of `make gpu`, and a smoke test on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import GpuFigure
from tests.live.cloud import LiveTestCloud

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


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LiveTestCloud]:
    """Agents and workers of this machine, and a bucket, for one test."""
    cloud = LiveTestCloud(tmp_path)
    yield cloud
    cloud.close()
