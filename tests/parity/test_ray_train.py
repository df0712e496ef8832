"""Every public name of Ray Train exists with equal parameters, order, kinds and defaults."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity.compare import differences
from tests.parity.describe import describe
from tests.parity.differences import INTENTIONAL_DIFFERENCES
from tests.parity.scope import (
    ENVIRONMENT,
    EXAMPLES,
    NEEDED_PACKAGES,
    RAY_MODULES,
    SPOTFIT_MODULES,
)

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("ray_train_2_60.json").read_text())
TABLE.pop(ENVIRONMENT)
KNOWN = frozenset(name for names in TABLE.values() for name in names)


def is_compared(module: str) -> bool:
    """Whether the framework that the module is about is installed; tests/frameworks has it."""
    package = NEEDED_PACKAGES.get(module)
    return package is None or importlib.util.find_spec(package) is not None


NAMES = [(module, name) for module, names in TABLE.items() for name in names if is_compared(module)]


def test_table_contains_every_compared_name() -> None:
    assert TABLE.keys() == RAY_MODULES.keys() == SPOTFIT_MODULES.keys()


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_name_of_ray_train_exists(module: str, name: str) -> None:
    found = different(module, name)
    unexplained = [
        what
        for key, what in found.items()
        if key not in INTENTIONAL_DIFFERENCES and name not in INTENTIONAL_DIFFERENCES
    ]
    assert not unexplained, f"{SPOTFIT_MODULES[module]}.{name} {'; '.join(unexplained)}"


@pytest.mark.parametrize("key", INTENTIONAL_DIFFERENCES)
def test_documented_differences_still_exist(key: str) -> None:
    found = [one for module, name in NAMES for one in different(module, name)]
    assert any(one == key or one.startswith(f"{key}.") for one in found)


def different(module: str, name: str) -> dict[str, str]:
    """Return the differences by name, or by name and member."""
    try:
        spotfit_module = importlib.import_module(SPOTFIT_MODULES[module])
        description = describe(getattr(spotfit_module, name), EXAMPLES.get(name))
    except (ImportError, AttributeError):
        return {name: "is not there"}
    found: dict[str, str] = {}
    for member, what in differences(TABLE[module][name], description, known=KNOWN):
        key = f"{name}.{member}" if member else name
        found[key] = f"{found[key]}; {what}" if key in found else what
    return found
