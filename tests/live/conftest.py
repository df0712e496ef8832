"""One keeper of zygotes for all live tests: torch is imported once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.agent.zygote import ZygoteKeeper
from tests.live.cloud import Cloud
from tests.live.stage import Stage


@pytest.fixture(scope="session")
def keeper() -> Iterator[ZygoteKeeper]:
    keeper = ZygoteKeeper()
    yield keeper
    keeper.close()


@pytest.fixture
def stage(tmp_path: Path, keeper: ZygoteKeeper) -> Iterator[Stage]:
    stage = Stage(tmp_path, keeper)
    yield stage
    stage.close()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """Machines and a bucket of this test's own. Whatever it leaves behind fails it."""
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()
