"""A simulated cloud as one process: its doors, its memory, its idle end."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.host.clocks import SystemClock
from spotfit_localsim.wire.options import SimOptions
from spotfit_localsim.wire.simulator import Simulator, serving

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


def test_machines_are_told_without_what_they_were_given(tmp_path: Path) -> None:
    with serving(tmp_path, SimOptions(boot_s=0.0)) as simulator:
        assert ask(simulator, "POST", "/groups/t-1", TASK)[0] == 200
        (machine,) = up(simulator)
        assert machine["task"] == "t-1/0"
        assert "s3cret" not in str(machine)
        status, struck = ask(simulator, "POST", "/-/reclaim", {"notice": False})
        assert (status, struck["why"]) == (200, "reclaimed")


def test_what_it_knows_outlives_it_at_the_same_address(tmp_path: Path) -> None:
    with serving(tmp_path, SimOptions()) as simulator:
        simulator.troubles.expect("capacity", 0)
        ask(simulator, "POST", "/groups/t-1", TASK)
        url = simulator.server.url
    with serving(tmp_path, SimOptions()) as again:
        assert again.server.url == url
        assert ask(again, "GET", "/groups/t-1")[0] == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [("/-/nothing", {}), ("/-/reclaim", {}), ("/-/trouble", {"kind": "x"}), ("/-/capacity", {})],
)
def test_what_cannot_be_done_is_told(tmp_path: Path, path: str, told: dict[str, Any]) -> None:
    with serving(tmp_path, SimOptions()) as simulator:
        status, answer = ask(simulator, "POST", path, told)
    assert status == 400
    assert answer["error"]


def test_a_cloud_out_of_order_answers_nobody_but_its_keeper(tmp_path: Path) -> None:
    with serving(tmp_path, SimOptions()) as simulator:
        ask(simulator, "POST", "/-/trouble", {"kind": "unavailable", "times": 1})
        assert ask(simulator, "GET", "/groups/t-1")[0] == 503
        assert ask(simulator, "GET", "/groups/t-1")[0] == 404
        assert ask(simulator, "POST", "/-/alive", {})[1]["cloud"] == "plain"


def test_where_nothing_runs_and_nobody_asks_it_leaves_without_a_trace(tmp_path: Path) -> None:
    root = tmp_path / "cloud"
    root.mkdir()
    simulator = Simulator(root, SimOptions(idle_s=0.05))
    simulator.run()
    simulator.close()
    assert not root.exists()
