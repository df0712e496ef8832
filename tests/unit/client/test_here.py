"""Local mode: the function runs right here, and nothing of a run is left behind."""

from __future__ import annotations

import pytest

import spotfit
from spotfit.client.here import fit_here
from spotfit.core.errors import SessionMisuseError
from spotfit.worker import current
from tests.unit.client.test_request import a_request


def test_it_returns_what_the_function_returns_and_reports() -> None:
    def train(config: dict[str, int]) -> int:
        spotfit.report({"loss": 0.5})
        return config["x"] * 2

    result = fit_here(a_request(train, {"x": 21}))
    assert (result.return_value, result.metrics) == (42, {"loss": 0.5})
    assert (result.path, result.error) == (None, None)


def test_a_function_without_a_config_gets_none() -> None:
    assert fit_here(a_request(lambda: 7)).return_value == 7
    assert fit_here(a_request(len)).return_value == 0, "without a config it is an empty one"


def test_what_it_raises_comes_through_as_it_is_and_the_session_ends() -> None:
    def train() -> None:
        raise KeyError("lr")

    with pytest.raises(KeyError, match="lr"):
        fit_here(a_request(train))
    with pytest.raises(SessionMisuseError):
        current.current("report")
