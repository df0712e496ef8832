"""A model is moved and wrapped as its group needs it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from spotfit.frameworks.torch import undrawn
from spotfit.frameworks.torch.prepare import (
    ddp_options,
    devices,
    enable_reproducibility,
    prepare_model,
)

CPU = torch.device("cpu")


@pytest.fixture
def group_of_gpus(tmp_path: Path) -> Iterator[None]:
    address = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(**changes: Any) -> torch.nn.Module:
    plain: dict[str, Any] = {
        "world_size": 2,
        "device": CPU,
        "move": True,
        "strategy": "ddp",
        "options": {},
    }
    return prepare_model(torch.nn.Linear(2, 2), **(plain | changes))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", None])
def test_one_worker_alone_gets_no_wrapper(strategy: str | None) -> None:
    assert type(prepared(world_size=1, strategy=strategy)) is torch.nn.Linear


def test_without_a_strategy_there_is_no_wrapper() -> None:
    assert type(prepared(strategy=None)) is torch.nn.Linear


def test_several_workers_get_ddp_even_when_the_model_stays_where_it_is(group: None) -> None:
    assert isinstance(prepared(), DistributedDataParallel)
    assert isinstance(prepared(move=False), DistributedDataParallel)


def test_options_reach_the_wrapper(group: None) -> None:
    wrapped = prepared(options={"find_unused_parameters": True})
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters is True


@pytest.mark.parametrize(("move", "there"), [(True, "meta"), (False, "cpu")])
def test_the_model_is_moved_if_it_is_to_be(move: bool, there: str) -> None:
    model = prepared(world_size=1, device=torch.device("meta"), move=move)
    assert {weight.device.type for weight in model.parameters()} == {there}


class On:
    """Stands for a model whose weights lie on these devices."""

    def __init__(self, *devices: str) -> None:
        self.devices = devices

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=torch.device(name)) for name in self.devices]


def test_a_model_on_one_gpu_tells_ddp_which() -> None:
    here = torch.device("cuda:1")
    told = ddp_options(On("cuda:1", "cuda:1"))  # type: ignore[arg-type]
    assert told == {"device_ids": [here], "output_device": here}


@pytest.mark.parametrize("where", [("cpu",), ("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("meta",)])
def test_any_other_model_does_not(where: tuple[str, ...]) -> None:
    assert ddp_options(On(*where)) == {}  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_weights_that_a_restore_brings_are_not_sent_by_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: sent.append(tensor.numel()))
    with undrawn.built(prepared, left_out=True):
        linear = torch.nn.Linear(3, 5)
        model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(5))
        made = prepare_model(model, world_size=2, device=CPU, move=True, strategy="ddp", options={})
    assert isinstance(made, DistributedDataParallel)
    assert sent == [5, 5, 1], "its buffers"
    assert linear.weight.isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_sharding_the_old_way_needs_gpus() -> None:
    with pytest.raises(RuntimeError, match="only available with GPU") as caught:
        prepared(strategy="fsdp")
    assert "fsdp2" in str(caught.value)


def test_sharding_the_new_way_does_not_and_means_the_same_for_one_worker(group: None) -> None:
    assert isinstance(prepared(strategy="fsdp2", world_size=1), FSDPModule)


def test_without_a_group_there_is_nothing_to_shard_over() -> None:
    assert type(prepared(strategy="fsdp2")) is torch.nn.Linear


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel_strategy must be"):
        prepared(strategy="zero")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_mixed_precision_is_torch_s_own(group: None, strategy: str) -> None:
    model = prepared(strategy=strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert loss.dtype is torch.bfloat16
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {
        torch.float32
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_on_a_gpu_every_wrapper_trains(group_of_gpus: None, strategy: str) -> None:
    device = torch.device("cuda:0")
    model = prepared(device=device, strategy=strategy)
    if isinstance(model, DistributedDataParallel):
        assert model.device_ids == [0]
    model(torch.ones(1, 2, device=device)).sum().backward()
    assert {weight.device for weight in model.parameters()} == {device}


def test_devices_are_the_worker_s_own_or_its_cpu() -> None:
    assert devices(()) == [CPU]
    assert devices(("cuda:2", "cuda:3")) == [torch.device("cuda:2"), torch.device("cuda:3")]


def test_where_nobody_deals_them_out_the_device_is_torch_s_own() -> None:
    has_gpu = torch.cuda.is_available()
    assert devices(None) == [torch.device("cuda", torch.cuda.current_device()) if has_gpu else CPU]


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


class Dice(Dataset[float]):
    """Every sample is a throw, in the process that reads it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return random.random() + float(numpy.random.rand())


def test_the_dice_of_data_workers_repeat_themselves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")

    def read(seed: int) -> list[float]:
        enable_reproducibility(seed)
        # Not forked: threads of other tests' libraries may hold locks in this process.
        loader = DataLoader(Dice(), num_workers=1, multiprocessing_context="spawn")
        return [float(batch) for batch in loader]

    try:
        assert read(7) == read(7) != read(8)
    finally:
        torch.use_deterministic_algorithms(mode=False)
