"""The process of a simulated cloud: its endpoints, its stored state, its idle exit."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")

TASK = {"command": ["/bin/sh", "-c", "exec sleep 100"], "environments": [{"SECRET": "s3cret"}]}


def send_request(simulator: Simulator, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(
        simulator.server.host, simulator.server.port, timeout=10
    )
    connection.request(method, path, msgspec.json.encode(body) if body is not None else None)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, msgspec.json.decode(text) if text else None


def wait_until_up(simulator: Simulator) -> list[dict[str, Any]]:
    clock = SystemClock()
    deadline_s = clock.now() + 20
    while True:
        machines: list[dict[str, Any]] = send_request(simulator, "POST", "/-/machines", {})[1]
        if any(machine["state"] == "up" for machine in machines):
            return machines
        assert clock.now() < deadline_s
        clock.wait(0.02)


def test_machine_summary_contains_no_secrets(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions(boot_s=0.0)) as simulator:
        assert send_request(simulator, "POST", "/groups/t-1", TASK)[0] == 200
        (machine,) = wait_until_up(simulator)
        assert machine["task"] == "t-1/0"
        assert "s3cret" not in str(machine)
        status, reclaimed = send_request(simulator, "POST", "/-/reclaim", {"notice": False})
        assert (status, reclaimed["end_reason"]) == (200, "reclaimed")


def test_reads_show_a_group_after_the_lag(tmp_path: Path) -> None:
    clock = SystemClock()
    with running_simulator(tmp_path, SimOptions(boot_s=0.0, lag_s=0.5)) as simulator:
        created_at = clock.now()
        assert send_request(simulator, "POST", "/groups/t-1", TASK)[0] == 200
        assert send_request(simulator, "GET", "/groups/t-1")[0] == 404
        assert wait_until_up(simulator), "it takes effect at once"
        while send_request(simulator, "GET", "/groups/t-1")[0] == 404:
            assert clock.now() < created_at + 20
            clock.wait(0.02)
        assert clock.now() - created_at >= 0.5


def test_state_and_address_survive_a_restart(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        simulator.faults.inject("capacity", 0)
        send_request(simulator, "POST", "/groups/t-1", TASK)
        url = simulator.server.url
    with running_simulator(tmp_path, SimOptions()) as again:
        assert again.server.url == url
        assert send_request(again, "GET", "/groups/t-1")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/-/nothing", {}), ("/-/reclaim", {}), ("/-/trouble", {"kind": "x"}), ("/-/capacity", {})],
)
def test_invalid_control_action_is_rejected(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        status, reply = send_request(simulator, "POST", path, body)
    assert status == 400
    assert reply["error"]


def test_unavailable_cloud_answers_control_actions_only(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        send_request(simulator, "POST", "/-/trouble", {"kind": "unavailable", "times": 1})
        assert send_request(simulator, "GET", "/groups/t-1")[0] == 503
        assert send_request(simulator, "GET", "/groups/t-1")[0] == 404
        assert send_request(simulator, "POST", "/-/alive", {})[1]["cloud"] == "plain"


def test_idle_simulator_exits_and_removes_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "cloud"
    root.mkdir()
    simulator = Simulator(root, SimOptions(idle_s=0.05))
    simulator.run()
    simulator.close()
    assert not root.exists()
