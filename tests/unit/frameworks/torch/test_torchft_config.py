"""torchft: a process group per worker, and a lighthouse whose address every worker gets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.frameworks.torch.torchft_config import TorchftBackend, TorchftConfig, TorchftFramework
from spotfit.model.config import ScalingConfig
from tests.unit.frameworks.workers import a_worker_start


class OneWorker:
    """A group whose only worker is this process."""

    def execute(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return [fn(*args)]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchftBackend]:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "")
    made = TorchftBackend()
    yield made
    made.on_shutdown(OneWorker(), None)


def test_torchft_config_is_a_torch_config_with_a_lighthouse() -> None:
    config = TorchftConfig({"min_replicas": 1}, timeout_s=60)
    assert isinstance(config, TorchConfig)
    assert dataclasses.is_dataclass(config)
    assert config.backend_cls is TorchftBackend
    name, options = config.framework_options(ScalingConfig())
    assert name == "torchft"
    assert (options["backend"], options["timeout_s"]) == ("gloo", 60)
    assert options["lighthouse_kwargs"] == {"min_replicas": 1}


def test_every_round_has_a_new_lighthouse(backend: TorchftBackend) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed; `pip install torchft`")
    places = set()
    for _ in range(2):
        backend.on_start(OneWorker(), TorchftConfig({"min_replicas": 1}))
        places.add(os.environ["TORCHFT_LIGHTHOUSE"])
    assert len(places) == 2
    assert all(place.startswith("http://127.0.0.1:") for place in places)


def test_a_missing_torchft_is_named(backend: TorchftBackend) -> None:
    try:
        import torchft  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="needs the package torchft"):
            backend.on_start(OneWorker(), TorchftConfig({"min_replicas": 1}))


def test_torchft_is_registered() -> None:
    assert isinstance(open_framework("torchft"), TorchftFramework)


def test_each_worker_has_a_separate_group_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")

    def no_gather(_kind: str, _value: bytes) -> tuple[bytes]:
        raise AssertionError("a group of one needs no all-gather")

    second = a_worker_start(rank=1, world_size=2)
    framework = TorchftFramework()
    try:
        framework.form_group(second, no_gather)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        port = int(os.environ["MASTER_PORT"])
        TCPStore(os.environ["MASTER_ADDR"], port, is_master=False).set("key", "value")
    finally:
        framework.leave_group()
    assert framework.environment(second)["RANK"] == "1"
