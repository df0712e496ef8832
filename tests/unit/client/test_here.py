"""Local mode: the function runs right here, and nothing of a run is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest

import spotfit
from spotfit.client.config import RunConfig
from spotfit.client.here import fit_here
from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.frameworks.config import BackendConfig
from spotfit.model.callbacks import UserCallback
from spotfit.model.ranks import Ranks
from spotfit.worker import current
from tests.unit.client.test_request import a_request


def test_it_returns_what_the_function_returns_and_reports() -> None:
    def train(config: dict[str, int]) -> int:
        spotfit.report({"loss": 0.5})
        return config["x"] * 2

    result = fit_here(a_request(train, {"x": 21}))
    assert (result.return_value, result.metrics) == (42, {"loss": 0.5})
    assert (result.path, result.error) == (None, None)


class Lit(BackendConfig):
    """Puts a context around the function."""

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: suppress(ZeroDivisionError)


def test_a_context_lies_around_it_and_may_swallow_what_it_raises() -> None:
    assert fit_here(a_request(lambda: 1 / 0, backend_config=Lit())).return_value is None
    with pytest.raises(ZeroDivisionError):
        fit_here(a_request(lambda: 1 / 0))


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


def test_what_only_workers_would_heed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(callbacks=[UserCallback()], worker_runtime_env={"pip": ["x"]})
    fit_here(a_request(experiment, run=run))
    said = capsys.readouterr().err
    assert "no_effect of=callbacks" in said
    assert "no_effect of=worker_runtime_env" in said


def test_within_another_training_function_it_is_alone_and_leaves_that_one_be() -> None:
    def outer() -> tuple[str, str]:
        inner = fit_here(a_request(experiment, run=RunConfig(name="inner")), refused)
        return inner.return_value, experiment()

    assert fit_here(a_request(outer)).return_value == ("inner", "digits")


def refused() -> Any:
    raise AssertionError("a launcher's variables are not meant for it")


def experiment() -> str:
    return spotfit.get_context().get_experiment_name()


# --- beside others that a launcher has started ----------------------------------------------------


class Others:
    """Rank 1 of two."""

    ranks = Ranks(1, 2, 1, 2)

    def barrier(self) -> None:
        """All are here."""

    def broadcast(self, thing: Any) -> Any:
        return f"rank 0's instead of {thing}"


def test_ranks_collectives_and_the_name_are_those_of_the_group() -> None:
    def train() -> tuple[Any, ...]:
        me = spotfit.get_context()
        spotfit.collective.barrier()
        told = spotfit.collective.broadcast_from_rank_zero("mine")
        return me.get_world_rank(), me.get_world_size(), me.get_experiment_name(), told

    result = fit_here(a_request(train), lambda: nullcontext(Others()))
    assert result.return_value == (
        1,
        2,
        "rank 0's instead of digits",
        "rank 0's instead of mine",
    )


def test_several_processes_cannot_share_datasets() -> None:
    with pytest.raises(ConfigError, match="2 processes"):
        fit_here(a_request(experiment, datasets={"train": []}), lambda: nullcontext(Others()))


def test_what_a_backend_wants_around_the_function_is_around_it() -> None:
    told: list[str] = []

    class Around(BackendConfig):
        @property
        def train_func_context(self) -> Any:
            @contextmanager
            def around() -> Iterator[None]:
                told.append("before")
                yield
                told.append("after")

            return around

    fit_here(a_request(lambda: told.append("within"), backend_config=Around()))
    assert told == ["before", "within", "after"]
