"""Every public name of Ray Train exists with equal parameters, order, kinds and defaults."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import pytest

from spotfit.core.errors import UnsupportedNameError
from spotfit.core.unsupported_names import UNSUPPORTED_NAMES
from spotfit.migrate.name_map import SpotfitName, find_counterpart
from tests.parity.compare import differences
from tests.parity.describe import describe
from tests.parity.differences import (
    BEHAVES_DIFFERENTLY,
    INTENTIONAL_DIFFERENCES,
    NAME_NOTES,
)
from tests.parity.names_page import (
    DIFFERENT,
    REFUSED,
    SAME,
    TABLE,
    V1_TABLE,
    VARIABLES,
    count_parameters,
    rows_of,
    v1_rows_of,
)
from tests.parity.scope import (
    EXAMPLES,
    NEEDED_PACKAGES,
    RAY_MODULES,
    SPOTFIT_MODULES,
)

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
    if name in UNSUPPORTED_NAMES.get(SPOTFIT_MODULES[module], {}):
        with pytest.raises(UnsupportedNameError) as raised:
            __import__(SPOTFIT_MODULES[module], fromlist=[name])
        assert raised.value.do
        return
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
    if key.partition(".")[0] in {name for _, name in NAMES}:
        assert any(one == key or one.startswith(f"{key}.") for one in found)


def written_names() -> set[str]:
    """Return all names, members and parameters of the table, with the module of Ray."""
    found = set()
    for module, name, description in (
        (module, *one) for module, names in TABLE.items() for one in names.items()
    ):
        for member, facts in {"": description, **description.get("members", {})}.items():
            full = f"{module}.{name}.{member}".rstrip(".")
            found |= {full, *(f"{full}({one[0]})" for one in facts.get("parameters", ()))}
    return found


@pytest.mark.parametrize("key", [*BEHAVES_DIFFERENTLY, *NAME_NOTES])
def test_remarks_are_about_names_of_ray_train(key: str) -> None:
    assert key in written_names()


def test_page_has_a_state_for_every_name_and_a_reason_for_every_difference() -> None:
    rows = [row for module in TABLE for row in rows_of(module)]
    rows += [row for module in V1_TABLE for row in v1_rows_of(module)]
    names = [row for row in rows if not row.is_parameter]
    # The numbers of issue 19: 355 names and 308 parameters.
    assert len(names) + len(VARIABLES) >= 355
    assert count_parameters() >= 308
    assert {row.state for row in rows} == {SAME, DIFFERENT, REFUSED}
    unexplained = [row.name for row in rows if row.state != SAME and not row.note]
    assert all("." in name for name in unexplained), "members of refused names only"
    refused = {row.name for row in rows if row.state == REFUSED and row.note}
    assert {name.partition(".")[0] for name in unexplained} <= refused


V1_NAMES = [(module, name) for module, names in V1_TABLE.items() for name in names]


@pytest.mark.parametrize(("module", "name"), V1_NAMES, ids=[".".join(one) for one in V1_NAMES])
def test_removed_name_exists_or_is_refused_with_the_way_out(module: str, name: str) -> None:
    place = find_counterpart((*module.split("."), name))
    if isinstance(place, SpotfitName):
        assert resolve(place.dotted.replace("get_context()", "TrainContext"))
        return
    home = next(one for one, names in UNSUPPORTED_NAMES.items() if name in names)
    with pytest.raises(UnsupportedNameError, match=f"has no {name}") as raised:
        __import__(home, fromlist=[name])
    assert raised.value.do
    assert raised.value.do in place.do


@pytest.mark.parametrize(
    ("module", "name"), [one for one in V1_NAMES if one[1].endswith("Predictor")]
)
def test_predictors_take_the_arguments_of_ray(module: str, name: str) -> None:
    place = find_counterpart((*module.split("."), name))
    if not isinstance(place, SpotfitName):
        return
    compared = {"", "from_checkpoint", "predict"}
    description = describe(resolve(place.dotted))
    found = list(differences(V1_TABLE[module][name], description, known=frozenset()))
    missing = {what for member, what in found if member in compared and "parameter" in what}
    # `predict` passes its arguments to `predict_batch`, whose tests check them.
    accepts_all = {
        f"predict has no parameter {one[0]}"
        for one in V1_TABLE[module][name]["members"]["predict"]["parameters"]
    }
    assert compared - {""} <= description["members"].keys()
    assert missing <= accepts_all | KEYWORDS_BY_POSITION


KEYWORDS_BY_POSITION = {
    "parameter model is ['positional', None], not ['keyword only', 'None']",
    "parameter preprocessor is ['positional', 'None'], not ['keyword only', 'None']",
    "parameter use_gpu is ['positional', 'False'], not ['keyword only', 'False']",
}
"""Of `TensorflowPredictor`: what may be passed by position may be passed by name."""


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise AssertionError(dotted)


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
