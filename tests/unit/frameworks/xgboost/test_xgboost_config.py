"""XGBoost's configuration and communicator."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.backend_config import Backend, backend_hooks_class
from spotfit.frameworks.registry import open_framework
from spotfit.frameworks.xgboost.xgboost_config import XGBoostConfig, XGBoostFramework
from spotfit.model.config import ScalingConfig
from tests.unit.frameworks.workers import a_worker_start


def test_the_workers_use_the_framework() -> None:
    assert XGBoostConfig().framework_options(ScalingConfig()) == ("xgboost", {})
    assert isinstance(open_framework("xgboost"), XGBoostFramework)
    assert backend_hooks_class(XGBoostConfig()) is None


def test_another_communicator_is_rejected() -> None:
    config = XGBoostConfig(xgboost_communicator="federated")
    with pytest.raises(ConfigError, match="federated"):
        _ = config.backend_cls
    with pytest.raises(ConfigError, match="federated"):
        config.framework_options(ScalingConfig())
    assert XGBoostConfig().backend_cls is Backend


def test_the_ranks_are_in_the_environment() -> None:
    variables = XGBoostFramework().environment(a_worker_start(rank=1, world_size=2))
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", "2")


def test_a_single_worker_needs_no_tracker() -> None:
    pytest.importorskip("xgboost")

    def no_gather(_label: str, _value: bytes) -> tuple[bytes]:
        raise AssertionError("a group of one gathers nothing")

    framework = XGBoostFramework()
    framework.form_group(a_worker_start(), no_gather)
    framework.leave_group()


def join(rank: int, peer: Any, results: Any) -> None:
    """Form a group of two processes and send its rank, size and a sum."""
    import numpy
    from xgboost import collective

    def gather(_label: str, value: bytes) -> tuple[bytes, bytes]:
        if rank == 0:
            peer.send_bytes(value)
            return (value, b"")
        return (peer.recv_bytes(), value)

    framework = XGBoostFramework()
    framework.form_group(a_worker_start(rank=rank, world_size=2, host="127.0.0.1"), gather)
    total = collective.allreduce(numpy.array([rank + 1.0]), collective.Op.SUM)
    group = (collective.get_rank(), collective.get_world_size())
    framework.leave_group()
    results.put((rank, *group, int(total[0])))


@pytest.mark.real_time("two processes form a group")
def test_two_processes_form_a_communicator() -> None:
    pytest.importorskip("xgboost")
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    results = context.Queue()
    processes = [
        context.Process(target=join, args=(rank, end, results)) for rank, end in enumerate(ends)
    ]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [(0, 0, 2, 3), (1, 1, 2, 3)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
