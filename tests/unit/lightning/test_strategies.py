"""Strategies and environment answer for the worker; a Trainer without them is rejected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spotfit.core.errors import MissingExtraError, SessionMisuseError, UnpreparedTrainerError
from spotfit.frameworks.torch.torchrun_group import LauncherGroup
from spotfit.lightning.strategies import (
    WorkerDeepSpeedStrategy,
    WorkerEnvironment,
    WorkerFSDPStrategy,
    WorkerStrategy,
    prepare_trainer,
)
from spotfit.model.topology import Ranks
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


@pytest.fixture
def session() -> Iterator[LocalSession]:
    ranks = Ranks(world_rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1)
    session = LocalSession("run", LauncherGroup(ranks))
    training_api.set_session(session)
    yield session
    training_api.clear_session()


class ParentStrategy:
    """Stands for a strategy of Lightning."""

    launcher = None
    cluster_environment: Any = None

    def __init__(self, **options: Any) -> None:
        self.options = options

    def lightning_module_state_dict(self) -> dict[str, int]:
        return {"weight": 1}


class Strategy(WorkerStrategy, ParentStrategy):
    pass


class ShardedStrategy(WorkerFSDPStrategy, ParentStrategy):
    pass


class EngineStrategy(WorkerDeepSpeedStrategy, ParentStrategy):
    pass


def trainer_with(strategy: Any, environment: Any, *, world_size: int = 8) -> Any:
    strategy.cluster_environment = environment
    return SimpleNamespace(strategy=strategy, world_size=world_size)


def test_the_environment_has_the_ranks_of_the_context(session: LocalSession) -> None:
    environment = WorkerEnvironment()
    environment.set_world_size(1)
    environment.set_global_rank(0)
    environment.teardown()
    ranks = (environment.global_rank(), environment.local_rank(), environment.node_rank())
    assert (environment.world_size(), ranks) == (8, (5, 1, 1))
    assert environment.creates_processes_externally


def test_the_strategy_has_the_device_and_ranks_of_the_worker(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "devices", ("cpu",))
    strategy = Strategy(find_unused_parameters=True)
    strategy._configure_launcher()
    assert strategy.options == {"find_unused_parameters": True}
    assert strategy.root_device == torch.device("cpu")
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 5}
    assert ShardedStrategy().lightning_module_state_dict() == {"weight": 1}


def test_a_prepared_trainer_is_returned(session: LocalSession) -> None:
    trainer = trainer_with(Strategy(), WorkerEnvironment())
    assert prepare_trainer(trainer) is trainer


@pytest.mark.parametrize(
    ("strategy", "environment", "missing"),
    [
        (ParentStrategy(), WorkerEnvironment(), "RayDDPStrategy, RayFSDPStrategy or"),
        (Strategy(), object(), "RayLightningEnvironment in plugins="),
    ],
)
def test_another_strategy_or_environment_is_rejected_with_the_line_that_fixes_it(
    session: LocalSession, strategy: Any, environment: Any, missing: str
) -> None:
    with pytest.raises(UnpreparedTrainerError, match=missing) as raised:
        prepare_trainer(trainer_with(strategy, environment))
    assert 'Trainer(devices="auto"' in raised.value.do


def test_a_trainer_with_another_world_size_is_rejected(session: LocalSession) -> None:
    with pytest.raises(UnpreparedTrainerError, match="world size 1"):
        prepare_trainer(trainer_with(Strategy(), WorkerEnvironment(), world_size=1))


def test_outside_of_a_training_function_it_raises() -> None:
    with pytest.raises(SessionMisuseError):
        prepare_trainer(trainer_with(Strategy(), WorkerEnvironment()))


def test_a_strategy_of_deepspeed_needs_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match="pip install torch setuptools wheel"):
        EngineStrategy(stage=2)
