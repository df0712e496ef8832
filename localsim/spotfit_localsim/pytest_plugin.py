"""pytest fixtures for users' tests: a simulated spot cloud, and preemptions at chosen steps.

Installed with spotfit as a pytest plugin. Every pytest run of the environment imports this module,
so it imports spotfit and the simulators only when a test requests a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from spotfit_localsim.clouds.spot_cloud import SpotCloud as SpotCloud

_MARK = "spot_cloud"


class ReclaimAt(Protocol):
    """The type of the fixture `reclaim_at`."""

    def __call__(self, step: int, *, rank: int = 0, notice: bool = True) -> None:
        """Preempt the machine of `rank` at `step`; see `SpotCloud.reclaim_at`."""
        ...


def __getattr__(name: str) -> Any:
    """Import `SpotCloud` on first access, for type annotations in tests."""
    if name == "SpotCloud":
        from spotfit_localsim.clouds.spot_cloud import SpotCloud

        return SpotCloud
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--spot-cloud`."""
    parser.getgroup("spotfit").addoption(
        "--spot-cloud",
        default="plain",
        metavar="NAME",
        help="simulated cloud of tests without a `spot_cloud` marker (default: plain)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `spot_cloud`."""
    config.addinivalue_line(
        "markers", f"{_MARK}(cloud, **options): the simulated cloud of this test and its options"
    )


@pytest.fixture
def spot_cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SpotCloud]:
    """A simulated spot cloud with `spot_cloud.provisioner` and `spot_cloud.storage_path`.

    The environment is set so that trainers without `provisioner=` use it as well. The test fails at
    teardown if a planned preemption was not triggered because no run reported its step.
    """
    from spotfit_localsim.clouds.spot_cloud import SpotCloud

    # The marker wins over the command line; its position argument is the name of the cloud.
    mark = request.node.get_closest_marker(_MARK)
    options = {"cloud": request.config.getoption("--spot-cloud")}
    if mark is not None:
        options |= {"cloud": mark.args[0]} if mark.args else {}
        options |= mark.kwargs
    cloud = SpotCloud(tmp_path / "spot_cloud", **options)
    # Restored by pytest after the test.
    for name, text in cloud.environment().items():
        monkeypatch.setenv(name, text)
    try:
        yield cloud
    finally:
        cloud.close()
    for plan in cloud.unreached_plans():
        pytest.fail(f"reclaim_at({plan.step}) was never reached: no run reported that step.")


@pytest.fixture
def reclaim_at(spot_cloud: SpotCloud) -> ReclaimAt:
    """The method `reclaim_at(step, rank=0, notice=True)` of the test's `spot_cloud`."""
    return spot_cloud.reclaim_at
