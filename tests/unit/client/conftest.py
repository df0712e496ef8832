"""Fixtures of the client package."""

from pathlib import Path

import pytest

from tests.unit.client.harness import ClientHarness


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClientHarness:
    return ClientHarness(tmp_path, monkeypatch)
