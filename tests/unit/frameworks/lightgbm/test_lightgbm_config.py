"""LightGBM's network parameters, without LightGBM."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.lightgbm import lightgbm_config
from spotfit.frameworks.lightgbm.lightgbm_config import (
    LightGBMConfig,
    LightGBMFramework,
    check_is_distributed,
    get_network_params,
    machine_list,
)
from spotfit.frameworks.registry import open_framework
from spotfit.model.config import ScalingConfig
from tests.unit.frameworks.workers import a_worker_start


@pytest.fixture(autouse=True)
def _without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lightgbm_config, "require_module", lambda *_args, **_kwargs: None)
    yield
    LightGBMFramework().leave_group()


def form_group(rank: int = 0, host: str = "127.0.0.1") -> LightGBMFramework:
    def gather(_label: str, value: bytes) -> tuple[bytes, bytes]:
        return (value, b"127.0.7.2:99") if rank == 0 else (b"127.0.7.2:99", value)

    framework = LightGBMFramework()
    framework.form_group(a_worker_start(rank=rank, world_size=2, host=host), gather)
    return framework


def test_the_workers_use_the_framework() -> None:
    assert LightGBMConfig().framework_options(ScalingConfig()) == ("lightgbm", {})
    assert isinstance(open_framework("lightgbm"), LightGBMFramework)


def test_the_parameters_have_all_machines_by_rank_and_the_own_port() -> None:
    form_group(rank=1)
    params = get_network_params()
    assert params == {
        "num_machines": 2,
        "local_listen_port": params["local_listen_port"],
        "machines": f"127.0.0.1:99,127.0.0.1:{params['local_listen_port']}",
    }


def test_the_port_is_reserved_until_the_parameters_are_requested() -> None:
    form_group()
    network = lightgbm_config.current_network()
    assert network is not None
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", network._port)).close()
    assert not network.was_requested
    get_network_params()
    socket.create_server(("", network._port)).close()
    assert network.was_requested


def test_early_ranks_are_refused_until_lightgbm_listens() -> None:
    """Connected to the reserved port, they would wait for an answer forever."""
    form_group()
    network = lightgbm_config.current_network()
    assert network is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", network._port)).close()


def test_outside_of_a_trainer_there_are_no_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert get_network_params() == {}
    assert "lightgbm.no_network" in capsys.readouterr().err


@pytest.mark.parametrize("requests", [False, True])
def test_a_network_that_was_never_requested_is_logged(
    requests: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    framework = form_group()
    if requests:
        get_network_params()
    framework.leave_group()
    assert ("lightgbm.network_unused" in capsys.readouterr().err) is not requests
    assert lightgbm_config.current_network() is None


def test_addresses_of_several_machines_are_not_changed() -> None:
    addresses = ["10.0.0.1:4000", "10.0.0.2:4000"]
    assert machine_list(addresses) == addresses
    assert machine_list(["127.0.1.1:4000", "127.0.1.2:4001"]) == [
        "127.0.0.1:4000",
        "127.0.0.1:4001",
    ]


@pytest.mark.parametrize(
    ("host", "message"), [("192.0.2.1", "No network interface"), ("fd00::1", "IPv4 only")]
)
def test_an_address_that_lightgbm_cannot_find_is_rejected(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        form_group(host=host)


@pytest.mark.parametrize(
    ("params", "world_size", "is_distributed"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"num_machines": 2}, 2, False),
        ({"num_machines": 2, "tree_learner": "serial"}, 2, False),
        ({"tree_learner": "data"}, 2, False),
        ({"num_machines": 2, "tree_learner": "data"}, 2, True),
        ({"num_machines": 2, "tree": "voting"}, 2, True),
        ({"num_machines": 2, "tree_learner": "data"}, 4, False),
    ],
)
def test_parameters_of_separate_models_are_rejected(
    params: dict[str, Any], world_size: int, is_distributed: bool
) -> None:
    if is_distributed:
        check_is_distributed(params, world_size=world_size)
        return
    with pytest.raises(ConfigError, match="would train a LightGBM model of its own") as rejected:
        check_is_distributed(params, world_size=world_size)
    assert rejected.value.details["retryable"] is False
