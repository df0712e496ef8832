"""torch_xla reads its ranks from the variables of torchelastic."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.torch.xla_backend import TorchXlaFramework
from spotfit.protocol.worker_agent import StartWorker
from tests.unit.frameworks.workers import a_worker_start


def start(**options: Any) -> StartWorker:
    """Return the third of four workers, the first on the second node."""
    where: dict[str, Any] = {
        "rank": 2,
        "local_rank": 0,
        "world_size": 4,
        "local_world_size": 2,
        "node_rank": 1,
    }
    return a_worker_start(options=options, **where)


def test_torch_xla_is_registered() -> None:
    assert isinstance(open_framework("torch_xla"), TorchXlaFramework)


def test_all_variables_of_neuron_are_set() -> None:
    assert TorchXlaFramework().environment(start()) == {
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


def test_existing_efa_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    assert "FI_PROVIDER" not in TorchXlaFramework().environment(start())


def test_graph_extraction_is_enabled_if_requested() -> None:
    variables = TorchXlaFramework().environment(start(neuron_parallel_compile=True))
    assert variables["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"


def test_a_missing_torch_xla_is_named() -> None:
    with pytest.raises(MissingExtraError, match="needs the package torch_xla") as caught:
        TorchXlaFramework().form_group(start(), lambda _, value: (value,))
    assert isinstance(caught.value, ImportError)
