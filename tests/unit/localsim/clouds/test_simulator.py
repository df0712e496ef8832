"""A simulated cloud as one process: its doors, its memory, its idle end."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")

TASK = {"command": ["/bin/sh", "-c", "exec sleep 100"], "environments": [{"SECRET": "s3cret"}]}


def ask(simulator: Simulator, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    wire = http.client.HTTPConnection(simulator.server.host, simulator.server.port, timeout=10)
    wire.request(method, path, msgspec.json.encode(body) if body is not None else None)
    reply = wire.getresponse()
    text = reply.read()
    wire.close()
    return reply.status, msgspec.json.decode(text) if text else None


def up(simulator: Simulator) -> list[dict[str, Any]]:
    clock = SystemClock()
    give_up_at = clock.now() + 20
    while True:
        machines: list[dict[str, Any]] = ask(simulator, "POST", "/-/machines", {})[1]
        if any(machine["state"] == "up" for machine in machines):
            return machines
        assert clock.now() < give_up_at
        clock.wait(0.02)


def test_machine_summary_contains_no_secrets(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions(boot_s=0.0)) as simulator:
        assert ask(simulator, "POST", "/groups/t-1", TASK)[0] == 200
        (machine,) = up(simulator)
        assert machine["task"] == "t-1/0"
        assert "s3cret" not in str(machine)
        status, struck = ask(simulator, "POST", "/-/reclaim", {"notice": False})
        assert (status, struck["end_reason"]) == (200, "reclaimed")


def test_state_and_address_survive_a_restart(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        simulator.faults.inject("capacity", 0)
        ask(simulator, "POST", "/groups/t-1", TASK)
        url = simulator.server.url
    with running_simulator(tmp_path, SimOptions()) as again:
        assert again.server.url == url
        assert ask(again, "GET", "/groups/t-1")[0] == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [("/-/nothing", {}), ("/-/reclaim", {}), ("/-/trouble", {"kind": "x"}), ("/-/capacity", {})],
)
def test_invalid_control_action_is_rejected(
    tmp_path: Path, path: str, told: dict[str, Any]
) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        status, answer = ask(simulator, "POST", path, told)
    assert status == 400
    assert answer["error"]


def test_unavailable_cloud_answers_control_actions_only(tmp_path: Path) -> None:
    with running_simulator(tmp_path, SimOptions()) as simulator:
        ask(simulator, "POST", "/-/trouble", {"kind": "unavailable", "times": 1})
        assert ask(simulator, "GET", "/groups/t-1")[0] == 503
        assert ask(simulator, "GET", "/groups/t-1")[0] == 404
        assert ask(simulator, "POST", "/-/alive", {})[1]["cloud"] == "plain"


def test_idle_simulator_exits_and_removes_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "cloud"
    root.mkdir()
    simulator = Simulator(root, SimOptions(idle_s=0.05))
    simulator.run()
    simulator.close()
    assert not root.exists()
