"""Fixtures for the tests of users: a spot cloud of one's own, and machines taken away at a step.

pytest finds them by itself where spotfit is installed. Nothing else is imported until a test asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from spotfit_localsim.wire.spot_cloud import SpotCloud as SpotCloud

_MARK = "spot_cloud"


class ReclaimAt(Protocol):
    """What the fixture `reclaim_at` gives."""

    def __call__(self, step: int, *, rank: int = 0, notice: bool = True) -> None:
        """See `SpotCloud.reclaim_at`."""
        ...


def __getattr__(name: str) -> Any:
    """`SpotCloud`, for annotations: imported when somebody asks for it."""
    if name == "SpotCloud":
        from spotfit_localsim.wire.spot_cloud import SpotCloud

        return SpotCloud
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--spot-cloud`."""
    parser.getgroup("spotfit").addoption(
        "--spot-cloud",
        default="plain",
        metavar="NAME",
        help="which cloud `spot_cloud` simulates where a test does not say: aws_batch, … (plain)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The mark by which a test chooses its cloud."""
    config.addinivalue_line(
        "markers", f"{_MARK}(cloud, **options): which simulated cloud, and how it behaves"
    )


@pytest.fixture
def spot_cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SpotCloud]:
    """A simulated spot cloud: `spot_cloud.provisioner`, `spot_cloud.storage_path`.

    Trainers without a `provisioner=` train there, too. The test fails if a machine was to be taken
    away at a step that no run has reported.
    """
    from spotfit_localsim.wire.spot_cloud import SpotCloud

    cloud = SpotCloud(tmp_path / "spot_cloud", **_options(request))
    for name, text in cloud.environment().items():
        monkeypatch.setenv(name, text)
    try:
        yield cloud
    finally:
        cloud.close()
    for plan in cloud.unreached():
        pytest.fail(f"reclaim_at({plan.step}) was never reached: no report came so far.")


@pytest.fixture
def reclaim_at(spot_cloud: SpotCloud) -> ReclaimAt:
    """`reclaim_at(step, rank=0, notice=True)` of the test's `spot_cloud`."""
    return spot_cloud.reclaim_at


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    mark = request.node.get_closest_marker(_MARK)
    named = {"cloud": mark.args[0]} if mark is not None and mark.args else {}
    told = dict(mark.kwargs) if mark is not None else {}
    return {"cloud": request.config.getoption("--spot-cloud"), **named, **told}
