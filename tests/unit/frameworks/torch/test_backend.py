"""The process group: everybody meets at rank 0's fresh port, and only there."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.torch import backend as backend_of
from spotfit.frameworks.torch.backend import Torch
from spotfit.model.wire import Start
from tests.unit.frameworks.workers import a_worker


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    Torch().leave()


def start(**options: Any) -> Start:
    """A worker by itself whose caller said this in `TorchConfig`."""
    return a_worker(options=options)


def alone(_kind: str, value: bytes) -> bytes:
    return value


def test_everything_a_library_asks_for_is_set() -> None:
    told = Torch().environment(a_worker(rank=1, world_size=2))
    assert told == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }


def test_one_worker_has_a_group_too_and_may_have_the_next() -> None:
    for _ in range(2):
        framework = Torch()
        framework.enter(start(), alone)
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        framework.leave()
        assert not dist.is_initialized()


def test_every_round_has_a_port_of_its_own() -> None:
    ports = set()
    for _ in range(2):
        Torch().enter(start(), alone)
        ports.add(os.environ["MASTER_PORT"])
        Torch().leave()
    assert len(ports) == 2


def test_the_meeting_place_listens_on_one_address_only() -> None:
    with backend_of._listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_other_ranks_go_where_rank_0_says() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asked: list[tuple[str, bytes]] = []

    def gather(kind: str, value: bytes) -> bytes:
        asked.append((kind, value))
        return f"127.0.0.1 {store.port}".encode()

    theirs = backend_of._meet(a_worker(rank=1, world_size=2), gather, backend_of.TorchOptions())
    store.set("key", "value")
    assert theirs.get("key") == b"value"
    assert asked == [("torch_master", b"")]


@pytest.mark.parametrize("method", ["env", "tcp"])
def test_both_init_methods_meet_alike(method: str) -> None:
    Torch().enter(start(init_method=method), alone)
    assert dist.is_initialized()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_collective_that_hangs_ends_its_worker(backend: str) -> None:
    assert backend_of.nccl_settings(backend, {}) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"])
def test_what_somebody_has_decided_for_nccl_stays(name: str) -> None:
    assert backend_of.nccl_settings("nccl", {name: "0"}) == {}


def test_without_nccl_nothing_is_set_for_it() -> None:
    assert backend_of.nccl_settings("gloo", {}) == {}
    assert backend_of.nccl_settings("cpu:gloo", {}) == {}


def test_several_backends_go_as_torch_writes_them() -> None:
    Torch().enter(start(backend="cpu:gloo"), alone)
    assert dist.get_backend() == "cpu:gloo"


def test_the_package_of_tpus_is_named_where_it_is_missing() -> None:
    with pytest.raises(MissingExtraError, match="needs the package torch_tpu"):
        Torch().enter(start(backend="tpu_dist"), alone)


def test_a_gpu_of_its_node_is_told_by_the_number_the_worker_has_for_it() -> None:
    devices = ("cuda:2", "cuda:3", "cuda:4")
    told = Torch().environment(a_worker(rank=1, world_size=2, wants={"GPU": 1}, devices=devices))
    assert told["ACCELERATE_TORCH_DEVICE"] == "cuda:1"
    assert told["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_told_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    backend_of._name_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_group_that_does_not_let_go_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch().enter(start(), alone)
    here, there = socket.socketpair()
    with here, there:
        monkeypatch.setenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "0.01")
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", lambda: here.recv(1))
            Torch().leave()
        there.send(b"x")
