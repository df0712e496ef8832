"""Validation of names that become directories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.core.ids import parse_name


@pytest.mark.parametrize("name", ["digits", "0", "a b", "lr=0.1_b", "me@home", "x" * 128, "v1.2"])
def test_valid_names_are_returned_unchanged(name: str) -> None:
    assert parse_name(name, what="The run's name") == name


@pytest.mark.parametrize(
    "name",
    ["", "../up", "a/b", "a..b", ".hidden", "-dash", " a", "a ", "x" * 129, "ä", "a\nb", "a\\b"],
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="The run's name") as refused:
        parse_name(name, what="The run's name")
    assert refused.value.do


@given(st.text())
def test_every_valid_name_is_one_path_component(text: str) -> None:
    try:
        name = parse_name(text, what="It")
    except ConfigError:
        return
    assert name == text
    assert name.strip() == name
    assert ".." not in name
    assert not set(name) & set("/\\\0\n")
