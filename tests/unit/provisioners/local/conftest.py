"""The fixture `local_cloud`: a local cloud of its own whose machines run a stand-in agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.localsim.live.stand_in import LocalCloudHarness, make_importable


@pytest.fixture
def local_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCloudHarness]:
    make_importable(monkeypatch)
    harness = LocalCloudHarness(tmp_path)
    yield harness
    harness.close()
