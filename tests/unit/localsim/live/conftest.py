"""A local_cloud of stand-ins for every test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.localsim.live.stand_in import LocalCloudHarness, make_importable


@pytest.fixture
def local_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCloudHarness]:
    make_importable(monkeypatch)
    made = LocalCloudHarness(tmp_path)
    yield made
    made.close()
