"""The functions for training loops use the session of their worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spotfit.torch
from spotfit.frameworks.torch.torchrun_group import LauncherGroup
from spotfit.model.topology import Ranks
from spotfit.torch import loop
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession

NUMBERS = TensorDataset(torch.arange(10))


class OnCpus(LocalSession):
    """A worker without accelerators."""

    devices = ()


@pytest.fixture
def one_of_two() -> Iterator[None]:
    training_api.set_session(OnCpus("run", LauncherGroup(Ranks(world_rank=1, world_size=2))))
    yield
    training_api.clear_session()


@pytest.mark.usefixtures("one_of_two")
def test_a_loader_reads_the_shard_of_its_rank() -> None:
    prepared = loop.prepare_data_loader(DataLoader(NUMBERS, batch_size=5))
    assert [batch.tolist() for (batch,) in prepared] == [[1, 3, 5, 7, 9]]


@pytest.mark.usefixtures("one_of_two")
def test_a_loader_is_sharded_and_moved_only_if_requested() -> None:
    plain: DataLoader[Any] = DataLoader(NUMBERS)
    assert loop.prepare_data_loader(plain, add_dist_sampler=False, move_to_device=False) is plain
    shared = loop.prepare_data_loader(plain, move_to_device=False)
    assert isinstance(shared.sampler, DistributedSampler)
    moved = loop.prepare_data_loader(plain, add_dist_sampler=False)
    assert [number.device for (number,) in moved] == [loop.get_device()] * 10


@pytest.mark.usefixtures("one_of_two")
def test_a_model_may_stay_or_move_to_another_device() -> None:
    def prepared(**options: Any) -> str:
        model = torch.nn.Linear(1, 1, device="meta" if options else "cpu")
        made = loop.prepare_model(model, parallel_strategy=None, **options)
        return next(made.parameters()).device.type

    assert prepared() == "cpu"
    assert prepared(move_to_device=False) == "meta"
    assert prepared(move_to_device=torch.device("meta")) == "meta"


class OnGpus(LocalSession):
    """A worker to which two of the visible GPUs are assigned."""

    devices = ("cuda:2", "cuda:3")


def test_get_device_is_the_first_of_the_assigned_devices() -> None:
    training_api.set_session(OnGpus("run"))
    try:
        assert loop.get_devices() == [torch.device("cuda:2"), torch.device("cuda:3")]
        assert loop.get_device() == torch.device("cuda:2")
    finally:
        training_api.clear_session()


@pytest.mark.parametrize("old", [{"wrap_ddp": False}, {"ddp_kwargs": {}}])
def test_arguments_of_old_ray_versions_are_rejected(old: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        loop.prepare_model(torch.nn.Linear(1, 1), **old)


@pytest.mark.usefixtures("one_of_two")
def test_without_accelerators_the_device_is_the_cpu() -> None:
    assert loop.get_device() == torch.device("cpu")
    assert loop.get_devices() == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_device", ()),
        ("get_devices", ()),
        ("prepare_model", (torch.nn.Linear(1, 1),)),
        ("prepare_data_loader", (DataLoader(NUMBERS),)),
    ],
)
def test_outside_of_a_training_function_calls_are_rejected(name: str, arguments: Any) -> None:
    with pytest.raises(RuntimeError, match=f"`spotfit.torch.{name}` cannot be used outside"):
        getattr(spotfit.torch, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments"), [("accelerate", ()), ("backward", (1,)), ("prepare_optimizer", (1,))]
)
def test_removed_functions_raise(name: str, arguments: Any) -> None:
    with pytest.raises(DeprecationWarning, match=f"spotfit.torch.{name} is no longer"):
        getattr(spotfit.torch, name)(*arguments)
