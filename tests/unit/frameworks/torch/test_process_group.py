"""The process group is formed at a new port of rank 0."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.frameworks.torch import process_group as backend_of
from spotfit.frameworks.torch.process_group import TorchFramework
from spotfit.protocol.worker_agent import StartWorker
from tests.unit.frameworks.workers import a_worker_start


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    TorchFramework().leave_group()


def start(**options: Any) -> StartWorker:
    """Return a single worker with these options of `TorchConfig`."""
    return a_worker_start(options=options)


def alone(_kind: str, value: bytes) -> tuple[bytes]:
    return (value,)


def test_all_rank_variables_are_set() -> None:
    variables = TorchFramework().environment(a_worker_start(rank=1, world_size=2))
    assert variables == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }


def test_a_single_worker_can_form_several_groups() -> None:
    for _ in range(2):
        framework = TorchFramework()
        framework.form_group(start(), alone)
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        framework.leave_group()
        assert not dist.is_initialized()


def test_the_function_may_form_the_group_with_the_variables_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    for name in ("RESTART_COUNT", "RUN_ID", "USE_AGENT_STORE"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "")
    framework, worker = TorchFramework(), start(form_group=False)
    framework.form_group(worker, alone)
    assert not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 1
    assert dist.is_torchelastic_launched()
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(worker.round - 1)
    framework.leave_group()
    assert not dist.is_initialized()


def test_every_round_uses_a_new_port() -> None:
    ports = set()
    for _ in range(2):
        TorchFramework().form_group(start(), alone)
        ports.add(os.environ["MASTER_PORT"])
        TorchFramework().leave_group()
    assert len(ports) == 2


def test_the_store_listens_on_one_address_only() -> None:
    TorchFramework().form_group(start(), alone)
    port = int(os.environ["MASTER_PORT"])
    socket.create_connection((os.environ["MASTER_ADDR"], port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


def test_other_ranks_connect_to_the_address_of_rank_0() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gathered: list[tuple[str, bytes]] = []

    def gather(kind: str, value: bytes) -> tuple[bytes, ...]:
        gathered.append((kind, value))
        return (f"127.0.0.1 {store.port}".encode(), value)

    client = backend_of._rendezvous_store(
        a_worker_start(rank=1, world_size=2), gather, backend_of.TorchOptions()
    )
    store.set("key", "value")
    assert client.get("key") == b"value"
    assert gathered == [("torch_master", b"")]


@pytest.mark.parametrize("method", ["env", "tcp"])
def test_both_init_methods_form_the_group(method: str) -> None:
    TorchFramework().form_group(start(init_method=method), alone)
    assert dist.is_initialized()


def test_torch_chooses_how_nccl_errors_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default, 3, ends the process without ncclCommAbort, which may hang."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(backend_of, "init_default_group", lambda *_: None)  # NCCL needs a GPU
    TorchFramework().form_group(start(backend="nccl"), alone)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_several_backends_are_accepted() -> None:
    TorchFramework().form_group(start(backend="cpu:gloo"), alone)
    assert dist.get_backend() == "cpu:gloo"


def test_a_missing_tpu_package_is_named() -> None:
    with pytest.raises(MissingExtraError, match="needs the package torch_tpu"):
        TorchFramework().form_group(start(backend="tpu_dist"), alone)


def test_the_default_device_has_the_number_that_the_worker_sees() -> None:
    devices = ("cuda:2", "cuda:3", "cuda:4")
    variables = TorchFramework().environment(
        a_worker_start(rank=1, world_size=2, resources={"GPU": 1}, devices=devices)
    )
    assert variables["ACCELERATE_TORCH_DEVICE"] == "cuda:1"
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_an_existing_network_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(backend_of, "init_default_group", lambda *_: None)
    TorchFramework().form_group(start(), alone)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("use", "world_size", "warns"),
    [
        (lambda: None, 2, True),
        (lambda: None, 1, False),
        (dist.barrier, 2, False),
        (lambda: dist.new_group([0]), 2, False),
    ],
    ids=["unused", "one worker", "collective", "other group"],
)
def test_workers_that_never_communicated_are_warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    use: Callable[[], object],
    world_size: int,
    warns: bool,
) -> None:
    framework = TorchFramework()
    framework.form_group(start(), alone)
    use()
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    framework.leave_group()
    assert ("torch.group_unused" in caplog.messages) == warns


def test_leave_group_stops_waiting_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    TorchFramework().form_group(start(), alone)
    first, second = socket.socketpair()
    with first, second:
        monkeypatch.setenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "0.01")
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", lambda: first.recv(1))
            TorchFramework().leave_group()
        second.send(b"x")


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_a_gpu_without_a_cuda_build_of_torch_is_named() -> None:
    worker = a_worker_start(resources={"GPU": 1}, devices=("cuda:0",))
    with pytest.raises(ConfigError, match=r"has a GPU, but torch .* is built without CUDA"):
        TorchFramework().form_group(worker, alone)
