"""What is gone is refused in one go, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.deprecated import DEPRECATED, refuse_deprecated

INSTEAD = {"stop": "return when it is done", "verbose": "set a log level"}


def test_all_that_were_given_are_named_with_their_remedies() -> None:
    with pytest.raises(DeprecationWarning) as told:
        refuse_deprecated("RunConfig", {"stop": None, "verbose": 1}, instead=INSTEAD)
    assert str(told.value) == (
        "RunConfig(stop=..., verbose=...) is no longer supported. "
        "stop: return when it is done; verbose: set a log level."
    )


def test_what_was_not_given_is_not_refused() -> None:
    refuse_deprecated("RunConfig", {"stop": DEPRECATED, "verbose": DEPRECATED}, instead=INSTEAD)
    refuse_deprecated("RunConfig", {"stop": "".join(["DEPRE", "CATED"])}, instead=INSTEAD)
    refuse_deprecated("Trainer", {"stop": None}, instead=INSTEAD, unset=None)


def test_an_object_that_compares_as_it_likes_counts_as_given() -> None:
    class Table:
        def __eq__(self, other: object) -> Any:
            raise ValueError("ambiguous")

        __hash__ = object.__hash__

    with pytest.raises(DeprecationWarning):
        refuse_deprecated("RunConfig", {"stop": Table()}, instead=INSTEAD)
