"""Fixtures of the front door."""

from pathlib import Path

import pytest

from tests.unit.client.door import Door


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    return Door(tmp_path, monkeypatch)
