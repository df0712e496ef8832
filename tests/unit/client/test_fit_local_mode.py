"""Local mode: the training function runs in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest

import spotfit.torch
from spotfit.client.fit import fit_locally
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.data.feeders import Feeders
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.model.topology import Ranks
from spotfit.model.user_callback import UserCallback
from spotfit.worker import training_api
from tests.unit.client.test_request import a_request


def test_the_result_has_return_value_and_metrics() -> None:
    def train(config: dict[str, int]) -> int:
        spotfit.report({"loss": 0.5})
        return config["x"] * 2

    result = fit_locally(a_request(train, {"x": 21}))
    assert (result.return_value, result.metrics) == (42, {"loss": 0.5})
    assert (result.path, result.error) == (None, None)


def test_the_last_steps_of_a_checkpointer_are_saved() -> None:
    torch = pytest.importorskip("torch")

    def train() -> None:
        ckpt = spotfit.torch.Checkpointer(model=torch.nn.Linear(2, 2), every=100)
        ckpt.restore()
        spotfit.report({"loss": 9.0})
        ckpt.step({"loss": 1.0})

    result = fit_locally(a_request(train))
    assert result.checkpoint is not None
    assert result.checkpoint.open_snapshot().indices[0].step == 1
    assert result.metrics == {"loss": 9.0}


def test_last_steps_that_cannot_be_saved_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")

    def train() -> str:
        model = torch.nn.Linear(2, 2)
        spotfit.torch.Checkpointer(model=model, every=100).step()
        model.half()
        return "done"

    assert fit_locally(a_request(train)).return_value == "done"
    assert "checkpoint.unsaved" in capsys.readouterr().err


class SuppressingConfig(BackendConfig):
    """Suppresses ZeroDivisionError of the function."""

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: suppress(ZeroDivisionError)


def test_a_context_may_suppress_exceptions() -> None:
    assert (
        fit_locally(a_request(lambda: 1 / 0, backend_config=SuppressingConfig())).return_value
        is None
    )
    with pytest.raises(ZeroDivisionError):
        fit_locally(a_request(lambda: 1 / 0))


def test_a_function_may_take_no_config() -> None:
    assert fit_locally(a_request(lambda: 7)).return_value == 7
    assert fit_locally(a_request(len)).return_value == 0, "the default config is empty"


def test_exceptions_propagate_and_end_the_session() -> None:
    def train() -> None:
        raise KeyError("lr")

    with pytest.raises(KeyError, match="lr"):
        fit_locally(a_request(train))
    with pytest.raises(SessionMisuseError):
        training_api.require_session("report")


def test_settings_without_effect_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(callbacks=[UserCallback()], worker_runtime_env={"pip": ["x"]})
    request = dataclasses.replace(a_request(experiment, run=run), data_feeders=Feeders(nodes=2))
    fit_locally(request)
    err = capsys.readouterr().err
    assert "config.ignored option=callbacks" in err
    assert "config.ignored option=data_feeders" in err
    assert "config.ignored option=worker_runtime_env" in err


def test_a_nested_fit_ignores_the_launcher_and_restores_the_session() -> None:
    def outer() -> tuple[str, str]:
        inner = fit_locally(a_request(experiment, run=RunConfig(name="inner")), refused)
        return inner.return_value, experiment()

    assert fit_locally(a_request(outer)).return_value == ("inner", "digits")


def refused() -> Any:
    raise AssertionError("a nested fit must not join the group")


def experiment() -> str:
    return spotfit.get_context().get_experiment_name()


# --- with a launcher ------------------------------------------------------------------------------


class FakePeers:
    """Rank 1 of two."""

    ranks = Ranks(world_rank=1, world_size=2, local_rank=1, local_world_size=2)

    def barrier(self) -> None:
        """All ranks have arrived."""

    def broadcast(self, value: Any) -> Any:
        return f"rank 0's instead of {value}"


def test_ranks_name_and_collectives_come_from_the_group() -> None:
    def train() -> tuple[Any, ...]:
        context = spotfit.get_context()
        spotfit.collective.barrier()
        received = spotfit.collective.broadcast_from_rank_zero("mine")
        return (
            context.get_world_rank(),
            context.get_world_size(),
            context.get_experiment_name(),
            received,
        )

    result = fit_locally(a_request(train), lambda: nullcontext(FakePeers()))
    assert result.return_value == (
        1,
        2,
        "rank 0's instead of digits",
        "rank 0's instead of mine",
    )


@pytest.mark.parametrize("dataset", [[1, 2], lambda: [1, 2]])
def test_objects_that_cannot_be_split_are_refused_with_several_processes(dataset: Any) -> None:
    def read() -> Any:
        return spotfit.get_dataset_shard("train")

    with pytest.raises(ConfigError, match="'train' is a list"):
        fit_locally(a_request(read, datasets={"train": dataset}), lambda: nullcontext(FakePeers()))


def test_the_context_of_the_backend_surrounds_the_function() -> None:
    events: list[str] = []

    class Around(BackendConfig):
        @property
        def train_func_context(self) -> Any:
            @contextmanager
            def around() -> Iterator[None]:
                events.append("before")
                yield
                events.append("after")

            return around

    fit_locally(a_request(lambda: events.append("within"), backend_config=Around()))
    assert events == ["before", "within", "after"]
