"""Results of operations are those of Ray Data, as record_ray_datasets.py has recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import spotfit.data
from tests.unit.data.dataset_cases import cases, result_of

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("ray_datasets.json").read_text())
CASES = cases(spotfit.data)

# docs/guides/dataset_operations.md lists them for users.
DIFFERENCES = {
    "map, times": "times keep their zone and microseconds",
    "map, lists of different lengths": "lists; Ray has arrays if the function returned arrays",
    "split_proportionately, small": "a row for each part; Ray raises an error",
    "aggregate, further": "lists are in order of the rows; Ray's are in any order",
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_result_of_ray(name: str) -> None:
    assert (result_of(CASES[name]) == RECORDED[name]) == (name not in DIFFERENCES)


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == list(CASES)
    assert set(DIFFERENCES) <= set(CASES)
