"""A town of stand-ins for every test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.localsim.live.stand_in import Town, importable


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Town]:
    importable(monkeypatch)
    made = Town(tmp_path)
    yield made
    made.close()
