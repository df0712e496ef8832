"""The public names: pinned, so that one comes or goes on purpose only, and documented."""

import inspect

import pytest

import spotfit
from tests.house.tree import ROOT

PINNED = (ROOT / "tests/house/public_names.txt").read_text().split()


def test_the_public_names_are_the_pinned_ones() -> None:
    assert sorted(spotfit.__all__) == PINNED, (
        "a public name came or went: if that is meant, change public_names.txt and CHANGELOG.md"
    )


@pytest.mark.parametrize("name", PINNED)
def test_a_public_name_says_what_it_is_for(name: str) -> None:
    thing = getattr(spotfit, name)
    if inspect.isclass(thing) or callable(thing):
        assert inspect.getdoc(thing), f"spotfit.{name} has no docstring"
        assert not inspect.isclass(thing) or "__doc__" in vars(thing)


def test_completion_offers_the_public_names() -> None:
    assert set(PINNED) <= set(dir(spotfit))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        getattr(spotfit, "no_such_name")  # noqa: B009  # as a caller who misspells would
