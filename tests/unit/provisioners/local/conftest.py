"""The fixture `local_cloud`: a separate local cloud whose machines run a fake agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.localsim.live.local_cloud_harness import LocalCloudHarness, make_importable


@pytest.fixture
def local_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCloudHarness]:
    make_importable(monkeypatch)
    harness = LocalCloudHarness(tmp_path)
    yield harness
    harness.close()
