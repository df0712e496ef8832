"""torchft: a worker is alone in torch's own group, and others find its store."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported in fact

from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.torch.torchft import Torchft
from tests.unit.frameworks.workers import a_worker


def test_it_is_found_by_its_name() -> None:
    assert isinstance(open_framework("torchft"), Torchft)


def test_each_worker_has_a_group_and_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")

    def asked(_kind: str, _value: bytes) -> bytes:
        raise AssertionError("it needs nobody to meet")

    second = a_worker(rank=1, world_size=2)
    framework = Torchft()
    try:
        framework.enter(second, asked)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        port = int(os.environ["MASTER_PORT"])
        TCPStore(os.environ["MASTER_ADDR"], port, is_master=False).set("key", "value")
    finally:
        framework.leave()
    assert framework.environment(second)["RANK"] == "1"
