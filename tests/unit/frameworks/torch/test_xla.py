"""torch_xla is told its place in the words of torch's own launcher."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.torch.xla import TorchXla
from spotfit.model.wire import Start
from tests.unit.frameworks.workers import a_worker


def start(**options: Any) -> Start:
    """The third of four workers, the first on the second node."""
    where: dict[str, Any] = {
        "rank": 2,
        "local_rank": 0,
        "world_size": 4,
        "local_world_size": 2,
        "node_rank": 1,
    }
    return a_worker(options=options, **where)


def test_it_is_found_by_its_name() -> None:
    assert isinstance(open_framework("torch_xla"), TorchXla)


def test_everything_it_asks_for_is_set() -> None:
    assert TorchXla().environment(start()) == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_WORLD_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "r-3",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "XLA_TRANSFER_SEED_ASYNC": "1",
    }


def test_the_fabric_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    assert "FI_PROVIDER" not in TorchXla().environment(start())


def test_graphs_are_extracted_when_they_are_to_be_compiled() -> None:
    told = TorchXla().environment(start(neuron_parallel_compile=True))
    assert told["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"


def test_without_torch_xla_it_is_named() -> None:
    with pytest.raises(MissingExtraError, match="needs the package torch_xla") as caught:
        TorchXla().enter(start(), lambda _, value: value)
    assert isinstance(caught.value, ImportError)
