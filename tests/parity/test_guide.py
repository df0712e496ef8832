"""The migration guide is complete: names, differences, variables and examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spotfit.host.env import ENV_VARS
from spotfit.migrate.edit import rewrite_script
from spotfit.migrate.name_map import find_variable
from tests.house.tree import ROOT
from tests.parity.differences import BEHAVIOR_DIFFERENCES
from tests.parity.scope import ENVIRONMENT

GUIDE = (ROOT / "docs/migrating_from_ray_train.md").read_text()
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("ray_train_2_60.json").read_text())
VARIABLES: list[str] = TABLE.pop(ENVIRONMENT)
SHOWN = re.compile(r"<!-- (before|after) -->\n```python\n(.*?)```", re.DOTALL)
RENAMED = re.compile(r"^\| `(RAY_\w+)` \| `(SPOTFIT_\w+)` \|", re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "`TrainRunContext`",
        *(one.guide for one in BEHAVIOR_DIFFERENCES.values()),
    ],
)
def test_guide_lists_every_difference(text: str) -> None:
    different = GUIDE.partition("## What is different")[2].partition("## Every name")[0]
    assert f"| {text}" in different


def test_migrate_command_produces_the_documented_script() -> None:
    shown = dict(SHOWN.findall(GUIDE))
    moved = rewrite_script(shown["before"].encode())
    assert moved.text.decode() == shown["after"]
    assert not moved.manual_notes


def test_guide_lists_every_renamed_variable() -> None:
    result = dict(RENAMED.findall(GUIDE))
    assert result == {setting.ray_name: setting.name for setting in ENV_VARS if setting.ray_name}
    assert all(find_variable(ray_name) == name for ray_name, name in result.items())


@pytest.mark.parametrize("name", VARIABLES)
def test_guide_lists_every_variable_of_ray_train(name: str) -> None:
    assert (
        f"`{name}`" in GUIDE.partition("## Environment variables")[2].partition("## What stays")[0]
    )
