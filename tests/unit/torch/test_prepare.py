"""Models are moved to their device and wrapped for their process group."""

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

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint import deferred_init
from spotfit.torch.prepare import ddp_options, enable_reproducibility, prepare_model, torch_devices

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
def test_a_single_worker_gets_no_wrapper(strategy: str | None) -> None:
    assert type(prepared(world_size=1, strategy=strategy)) is torch.nn.Linear


def test_without_a_strategy_there_is_no_wrapper() -> None:
    assert type(prepared(strategy=None)) is torch.nn.Linear


def test_several_workers_get_ddp_without_moving_the_model(group: None) -> None:
    assert isinstance(prepared(), DistributedDataParallel)
    assert isinstance(prepared(move=False), DistributedDataParallel)


def test_options_reach_the_wrapper(group: None) -> None:
    wrapped = prepared(options={"find_unused_parameters": True})
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters is True


@pytest.mark.parametrize(("move", "device"), [(True, "meta"), (False, "cpu")])
def test_the_model_is_moved_only_if_requested(move: bool, device: str) -> None:
    model = prepared(world_size=1, device=torch.device("meta"), move=move)
    assert {weight.device.type for weight in model.parameters()} == {device}


class On:
    """A fake model with parameters on these devices."""

    def __init__(self, *devices: str) -> None:
        self.devices = devices

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=torch.device(name)) for name in self.devices]


def test_ddp_gets_the_device_of_a_model_on_one_gpu() -> None:
    device = torch.device("cuda:1")
    options = ddp_options(On("cuda:1", "cuda:1"))  # type: ignore[arg-type]
    assert options == {"device_ids": [device], "output_device": device}


@pytest.mark.parametrize("where", [("cpu",), ("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("meta",)])
def test_ddp_gets_no_device_for_other_models(where: tuple[str, ...]) -> None:
    assert ddp_options(On(*where)) == {}  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_deferred_weights_are_not_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: sent.append(tensor.numel()))
    with deferred_init.defer_init(prepared, deferred=True):
        linear = torch.nn.Linear(3, 5)
        model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(5))
        made = prepare_model(model, world_size=2, device=CPU, move=True, strategy="ddp", options={})
    assert isinstance(made, DistributedDataParallel)
    assert sent == [5, 5, 1], "its buffers"
    assert linear.weight.isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_fsdp_requires_gpus() -> None:
    with pytest.raises(ConfigError, match="only available with GPU") as caught:
        prepared(strategy="fsdp")
    assert "fsdp2" in str(caught.value)


def test_fsdp2_shards_on_cpus_and_with_one_worker(group: None) -> None:
    assert isinstance(prepared(strategy="fsdp2", world_size=1), FSDPModule)


def test_fsdp2_without_a_process_group_returns_the_model() -> None:
    assert type(prepared(strategy="fsdp2")) is torch.nn.Linear


def test_an_unknown_strategy_is_rejected() -> None:
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


def test_devices_are_the_assigned_ones_or_the_cpu() -> None:
    assert torch_devices(()) == [CPU]
    assert torch_devices(("cuda:2", "cuda:3")) == [torch.device("cuda:2"), torch.device("cuda:3")]


def test_without_an_assignment_the_device_is_torch_s_current_one() -> None:
    has_gpu = torch.cuda.is_available()
    assert torch_devices(None) == [
        torch.device("cuda", torch.cuda.current_device()) if has_gpu else CPU
    ]


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(numpy.random.rand())


def test_random_numbers_repeat_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        enable_reproducibility(7)
        first = draw()
        enable_reproducibility(7)
        assert draw() == first
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        enable_reproducibility(8)
        assert draw() != first
    finally:
        torch.use_deterministic_algorithms(mode=False)


class RandomSamples(Dataset[float]):
    """Every sample is a random number of the process that reads it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return random.random() + float(numpy.random.rand())


@pytest.mark.timeout(90)  # spawning a data worker imports torch
def test_random_numbers_of_data_workers_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")

    def read(seed: int) -> list[float]:
        enable_reproducibility(seed)
        # Not forked: threads of other tests' libraries may hold locks in this process.
        loader = DataLoader(RandomSamples(), num_workers=1, multiprocessing_context="spawn")
        return [float(batch) for batch in loader]

    try:
        assert read(7) == read(7) != read(8)
    finally:
        torch.use_deterministic_algorithms(mode=False)
