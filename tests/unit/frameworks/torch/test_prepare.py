"""A model is moved and wrapped as its group needs it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spotfit.frameworks.torch.prepare import devices, enable_reproducibility, prepare_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one: what DistributedDataParallel needs to be made."""
    address = f"file://{tmp_path_factory.mktemp('group')}/store"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(**changes: Any) -> torch.nn.Module:
    plain: dict[str, Any] = {"world_size": 2, "device": CPU, "strategy": "ddp", "options": {}}
    return prepare_model(torch.nn.Linear(2, 2), **(plain | changes))


def test_one_worker_alone_gets_no_wrapper() -> None:
    assert isinstance(prepared(world_size=1), torch.nn.Linear)


def test_without_a_strategy_there_is_no_wrapper() -> None:
    assert isinstance(prepared(strategy=None), torch.nn.Linear)


def test_several_workers_get_ddp_even_when_the_model_stays_where_it_is(group: None) -> None:
    assert isinstance(prepared(), DistributedDataParallel)
    assert isinstance(prepared(device=None), DistributedDataParallel)


def test_options_reach_the_wrapper(group: None) -> None:
    wrapped = prepared(options={"find_unused_parameters": True})
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters is True


def test_the_model_is_moved() -> None:
    moved = prepared(world_size=1, device=torch.device("meta"))
    assert {weight.device.type for weight in moved.parameters()} == {"meta"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_sharding_needs_gpus() -> None:
    with pytest.raises(RuntimeError, match="only available with GPU"):
        prepared(strategy="fsdp")


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel_strategy must be"):
        prepared(strategy="zero")


def test_devices_are_the_worker_s_own_or_its_cpu() -> None:
    assert devices(()) == [CPU]
    assert devices(("cuda:2", "cuda:3")) == [torch.device("cuda:2"), torch.device("cuda:3")]


def throws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(numpy.random.rand())


def test_dice_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        enable_reproducibility(7)
        first = throws()
        enable_reproducibility(7)
        assert throws() == first
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        enable_reproducibility(8)
        assert throws() != first
    finally:
        torch.use_deterministic_algorithms(mode=False)
