"""The group of a launcher is joined if the environment describes one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.process_group import TorchFramework
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.frameworks.torch.torchrun_group import (
    gpu_of_local_rank,
    join_launcher_group,
    ranks_from_environment,
    select_backend,
)
from spotfit.model.topology import Ranks

ENVIRONMENT = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment that torchrun sets for a single process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, text in {**ENVIRONMENT, **alone, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, text)
    yield
    TorchFramework().leave_group()


def test_ranks_are_read_from_the_environment() -> None:
    assert ranks_from_environment(ENVIRONMENT) == Ranks(
        world_rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1
    )


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_without_one_of_the_variables_there_is_no_launcher(name: str) -> None:
    assert ranks_from_environment({**ENVIRONMENT, name: ""}) is None
    assert (
        ranks_from_environment({key: text for key, text in ENVIRONMENT.items() if key != name})
        is None
    )


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "five"}, {"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}],
)
def test_invalid_variables_are_rejected(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ranks_from_environment({**ENVIRONMENT, **wrong})


def test_without_a_launcher_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with join_launcher_group(TorchConfig()) as group:
        assert group is None
        assert not dist.is_initialized()


def test_the_group_is_joined_and_left(launched: None) -> None:
    with join_launcher_group(TorchConfig(backend="gloo")) as group:
        assert group is not None
        assert (group.ranks.world_size, dist.get_world_size()) == (1, 1)
        group.barrier()
        assert group.broadcast({"seed": 7}) == {"seed": 7}
    assert not dist.is_initialized()


def test_an_existing_group_is_not_destroyed(launched: None) -> None:
    dist.init_process_group("gloo")
    with join_launcher_group(TorchConfig()) as group:
        assert group is not None
    assert dist.is_initialized()


def test_after_a_failure_the_group_is_not_left(launched: None) -> None:
    with pytest.raises(KeyError), join_launcher_group(TorchConfig(backend="gloo")):
        raise KeyError("lr")
    assert dist.is_initialized(), "the launcher terminates all processes of the group"


@pytest.mark.parametrize(
    ("named", "has_gpus", "backend"),
    [
        (None, False, "gloo"),
        ("nccl", False, "gloo"),
        ("gloo", True, "cpu:gloo,cuda:nccl"),
        ("mpi", True, "mpi"),
    ],
)
def test_the_backend_follows_the_devices(
    named: str | None, *, has_gpus: bool, backend: str
) -> None:
    assert select_backend(named, has_gpus=has_gpus) == backend


@pytest.mark.parametrize(("visible", "gpu"), [(8, 5), (1, 0), (4, 1)])
def test_the_gpu_is_one_that_the_process_sees(visible: int, gpu: int) -> None:
    """srun --gpus-per-task=1 shows each process one GPU, whatever its local rank."""
    assert gpu_of_local_rank(5, visible) == gpu
