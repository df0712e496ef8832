"""Probes end with the recorded results of Ray Train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT
from tests.parity.behaviour import PROBES
from tests.parity.compare import answers_match
from tests.parity.differences import BEHAVIOR_DIFFERENCES

pytestmark = pytest.mark.timeout(300)  # all probes run in the setup of the first test

KEPT: dict[str, Any] = json.loads((ROOT / "tests/parity/behaviour_ray_2_60.json").read_text())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all probes with spotfit."""
    place = tmp_path_factory.mktemp("probes")
    command = [sys.executable, "-m", "tests.parity.behaviour", "spotfit", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(Path(place, "seen.json").read_text())
    return answers


def test_every_probe_has_a_recorded_answer_of_ray() -> None:
    assert KEPT.keys() == PROBES.keys()


@pytest.mark.parametrize("name", PROBES)
def test_probe_ends_as_with_ray_or_as_documented(name: str, seen: dict[str, Any]) -> None:
    same = answers_match(KEPT[name], seen[name])
    if name not in BEHAVIOR_DIFFERENCES:
        assert same, f"here {seen[name]}, with Ray {KEPT[name]}"
        return
    assert seen[name] == BEHAVIOR_DIFFERENCES[name].expected
    assert not same, "the results are equal: remove the explanation"
