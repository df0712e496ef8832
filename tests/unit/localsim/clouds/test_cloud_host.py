"""Machines as processes: boot, command, signals, stop, preemption, restart of the simulator."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.host.system import SystemClock
from spotfit.model.offer import Market
from spotfit_localsim.clouds.capacity import MarketOptions, RealTimeMarket
from spotfit_localsim.clouds.cloud_host import (
    ENDED,
    LOST,
    OUT_OF_MEMORY,
    RECLAIMED,
    SIM_ROOT_ENV,
    STOPPED,
    Datacenter,
    SimulatedMachine,
    memory_bytes_of_tree,
)
from spotfit_provisioners.local.processes import ProcessIdentity

pytestmark = pytest.mark.real_time("machines are real processes")

SLEEPS = ["/bin/sh", "-c", "exec sleep 100"]
IGNORES_SIGTERM = ["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]


def market_with(**options: float) -> RealTimeMarket:
    return RealTimeMarket(MarketOptions(**{"boot_s": 0.0, **options}), started_s=0.0)  # type: ignore[arg-type]


@pytest.fixture
def datacenter(tmp_path: Path) -> Iterator[Datacenter]:
    datacenter = Datacenter(tmp_path, market_with(notice_s=0.3))
    yield datacenter
    datacenter.close()


def until(datacenter: Datacenter, condition: Callable[[], object]) -> None:
    clock = SystemClock()
    deadline_s = clock.now() + 20
    while not condition():
        assert clock.now() < deadline_s
        datacenter.tick()
        clock.wait(0.01)


def rent(datacenter: Datacenter, command: list[str], **environment: str) -> SimulatedMachine:
    machine = datacenter.rent("task", command, environment)
    assert machine is not None
    return machine


def test_machine_runs_its_command_and_has_its_exit_code(datacenter: Datacenter) -> None:
    machine = rent(
        datacenter, ["/bin/sh", "-c", 'echo "hello $WHO from $SPOTFIT_HOST"; exit 3'], WHO="x"
    )
    assert machine.state == "booting"
    until(datacenter, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 3)
    assert datacenter.output(machine) == f"hello x from {machine.address}\n"


def test_variables_of_the_client_do_not_reach_a_machine(
    datacenter: Datacenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "client secret")
    monkeypatch.setenv("AWS_REGION", "client region")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "client region")
    machine = rent(datacenter, ["/bin/sh", "-c", "env"])
    until(datacenter, lambda: not machine.is_active)
    output = datacenter.output(machine)
    assert "client secret" not in output
    assert "client region" not in output
    assert f"{SIM_ROOT_ENV}={datacenter.root}" in output
    assert f"PATH={Path(sys.executable).parent}:" in output, (
        "the image provides the client's Python"
    )


def test_stopped_command_may_exit_within_the_grace_period(datacenter: Datacenter) -> None:
    machine = rent(
        datacenter, ["/bin/sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.02; done"]
    )
    until(datacenter, lambda: "up" in datacenter.output(machine))
    datacenter.stop(machine, grace_s=20)
    until(datacenter, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 9)


def test_command_that_ignores_sigterm_is_killed_after_the_grace_period(
    datacenter: Datacenter,
) -> None:
    machine = rent(datacenter, IGNORES_SIGTERM)
    until(datacenter, lambda: "up" in datacenter.output(machine))
    process = ProcessIdentity.parse(machine.pid)
    assert process is not None
    datacenter.stop(machine, grace_s=0.1)
    until(datacenter, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (STOPPED, None)
    assert not process.is_alive


def test_booting_machine_is_stopped_at_once(tmp_path: Path) -> None:
    datacenter = Datacenter(tmp_path, market_with(boot_s=1000.0))
    machine = rent(datacenter, SLEEPS)
    datacenter.stop(machine, grace_s=20)
    assert (machine.state, machine.end_reason) == ("over", STOPPED)


def test_reclaim_without_notice_ends_the_machine_at_once(datacenter: Datacenter) -> None:
    machine = rent(datacenter, SLEEPS)
    until(datacenter, lambda: machine.state == "up")
    datacenter.reclaim(machine, notice=False)
    assert machine.was_reclaimed
    assert machine.exit_code is None


def test_reclaim_with_notice_ends_the_machine_after_the_notice_period(
    datacenter: Datacenter,
) -> None:
    machine = rent(datacenter, IGNORES_SIGTERM)
    until(datacenter, lambda: "up" in datacenter.output(machine))
    datacenter.reclaim(machine, notice=True)
    assert machine.is_active
    assert machine.kill_due_s is not None
    until(datacenter, lambda: not machine.is_active)
    assert machine.was_reclaimed


def test_machine_with_a_notice_can_be_reclaimed_at_once(datacenter: Datacenter) -> None:
    machine = rent(datacenter, IGNORES_SIGTERM)
    until(datacenter, lambda: "up" in datacenter.output(machine))
    datacenter.reclaim(machine, notice=True)
    datacenter.reclaim(machine, notice=True)
    assert machine.is_active
    datacenter.reclaim(machine, notice=False)
    assert machine.was_reclaimed


def test_command_that_exits_during_the_notice_period_keeps_its_exit_code(
    datacenter: Datacenter,
) -> None:
    machine = rent(
        datacenter, ["/bin/sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.02; done; exit 75"]
    )
    until(datacenter, lambda: "up" in datacenter.output(machine))
    datacenter.reclaim(machine, notice=True)
    (datacenter.root / "machines" / "000001" / "go").touch()
    until(datacenter, lambda: not machine.is_active)
    assert machine.exit_code == 75
    assert not machine.was_reclaimed


def test_killed_command_has_the_exit_code_of_its_signal(datacenter: Datacenter) -> None:
    machine = rent(datacenter, ["/bin/sh", "-c", "echo up; exec sleep 100"])
    until(datacenter, lambda: "up" in datacenter.output(machine))
    datacenter.send_signal(machine, signal.SIGKILL)
    until(datacenter, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 137)


def test_machine_without_processes_is_lost(datacenter: Datacenter) -> None:
    machine = rent(datacenter, SLEEPS)
    until(datacenter, lambda: machine.state == "up")
    process = ProcessIdentity.parse(machine.pid)
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    until(datacenter, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (LOST, None)


def test_number_of_machines_is_limited_by_the_capacity(tmp_path: Path) -> None:
    market = market_with()
    datacenter = Datacenter(tmp_path, market)
    market.max_machines = 2
    first, second = (rent(datacenter, SLEEPS) for _ in range(2))
    assert datacenter.rent("third", SLEEPS, {}) is None
    until(datacenter, lambda: second.state == "up")
    market.max_machines = 1
    first.gets_notice = second.gets_notice = False
    datacenter.tick()
    assert first.is_active
    assert second.was_reclaimed, "the newest machine is reclaimed first"
    datacenter.close()


def test_on_demand_machines_are_not_preempted_when_spot_capacity_falls(tmp_path: Path) -> None:
    market = market_with(on_demand_capacity=1, reclaims_per_hour=1e9)
    datacenter = Datacenter(tmp_path, market)
    spot = rent(datacenter, SLEEPS)
    bought = datacenter.rent("task", SLEEPS, {}, market=Market.ON_DEMAND)
    assert bought is not None
    assert datacenter.rent("task", SLEEPS, {}, market=Market.ON_DEMAND) is None
    market.max_machines = market.max_on_demand_machines = 0
    until(datacenter, lambda: not spot.is_active and bought.state == "up")
    for _ in range(5):
        datacenter.tick()
    assert (spot.end_reason, bought.state, bought.noticed_at_s) == (RECLAIMED, "up", None)
    with pytest.raises(ConfigError, match="on-demand machine"):
        datacenter.reclaim(bought, notice=False)
    datacenter.close()
    assert bought.started_at_s is not None
    assert bought.created_at_s <= bought.started_at_s <= (bought.ended_at_s or 0.0)


def test_reopened_datacenter_restores_its_machines(datacenter: Datacenter) -> None:
    machine = rent(datacenter, IGNORES_SIGTERM)
    until(datacenter, lambda: "up" in datacenter.output(machine))
    reopened = Datacenter.open(datacenter.root, market_with())
    found = reopened.find_machine("task")
    assert found == machine
    reopened.tick()
    assert found is not None
    assert found.is_active
    reopened.reclaim(found, notice=False)
    assert found.was_reclaimed
    assert reopened.rent("next", SLEEPS, {}).number == machine.number + 1  # type: ignore[union-attr]
    reopened.remove(found)
    assert not (datacenter.root / "machines" / "000001").exists()
    reopened.close()


def test_concurrent_preemptions_end_a_machine_once(datacenter: Datacenter) -> None:
    machine = rent(datacenter, SLEEPS)
    until(datacenter, lambda: machine.state == "up")
    ended: list[SimulatedMachine] = []
    other = threading.Thread(target=datacenter.reclaim, args=[machine], kwargs={"notice": False})

    def end(machine: SimulatedMachine) -> None:
        ended.append(machine)
        if not other.is_alive():
            other.start()
            # The other thread must wait until this one is done.
            other.join(0.2)

    datacenter.hooks.close_metadata = end
    datacenter.reclaim(machine, notice=False)
    other.join()
    assert ended == [machine]


ALLOCATES = (
    "import time; kept = b'x' * (100 * 2**20); print('allocated', flush=True); time.sleep(60)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
@pytest.mark.parametrize(("limit_mib", "enforced"), [(50, True), (50, False), (500, True)])
def test_machine_is_killed_if_it_exceeds_the_limit_of_its_container(
    limit_mib: int, enforced: bool, tmp_path: Path
) -> None:
    datacenter = Datacenter(tmp_path, market_with(memory_limits=enforced))
    command = [sys.executable, "-c", ALLOCATES]
    machine = datacenter.rent("task", command, {}, memory_limit_mib=limit_mib)
    assert machine is not None
    if enforced and limit_mib < 100:
        until(datacenter, lambda: not machine.is_active)
        assert (machine.end_reason, machine.exit_code) == (OUT_OF_MEMORY, 137)
    else:
        until(datacenter, lambda: "allocated" in datacenter.output(machine))
        measured_at_s = machine.memory_measured_at_s
        until(datacenter, lambda: machine.memory_measured_at_s > measured_at_s)
        assert machine.is_active
    datacenter.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
def test_memory_that_processes_share_counts_once(datacenter: Datacenter) -> None:
    code = (
        "import os, time; kept = b'x' * (200 * 2**20)\n"
        "for _ in range(3): os.fork()\n"
        "print('forked', flush=True); time.sleep(60)"
    )
    machine = rent(datacenter, [sys.executable, "-c", code])
    until(datacenter, lambda: datacenter.output(machine).count("forked") == 8)
    process = ProcessIdentity.parse(machine.pid)
    assert process is not None
    assert 200 * 2**20 < memory_bytes_of_tree(process.pid) < 400 * 2**20


def test_machine_finds_its_gpus_and_its_instance(tmp_path: Path) -> None:
    datacenter = Datacenter(tmp_path, market_with(machines_per_instance=2))
    command = ["/bin/sh", "-c", "echo $SPOTFIT_DEVICES $SPOTFIT_INSTANCE"]
    machines = [datacenter.rent("task", command, {}, gpus=2) for _ in range(3)]
    until(datacenter, lambda: not any(datacenter.active_machines()))
    assert [datacenter.output(machine) for machine in machines if machine] == [
        "cuda:0,cuda:1 sim-000000\n",
        "cuda:0,cuda:1 sim-000000\n",
        "cuda:0,cuda:1 sim-000001\n",
    ]
    datacenter.close()


@pytest.mark.parametrize(
    ("command", "environment"),
    [(["echo", "a\0b"], {}), (["echo"], {"a=b": "c"}), (["echo", "a" * 2**18], {})],
)
def test_command_that_the_system_refuses_ends_its_machine_only(
    datacenter: Datacenter, command: list[str], environment: dict[str, str]
) -> None:
    refused = datacenter.rent("task", command, environment)
    assert refused is not None
    other = rent(datacenter, ["echo", "hello"])
    until(datacenter, lambda: not any(datacenter.active_machines()))
    assert (refused.end_reason, refused.exit_code) == (ENDED, 128)
    assert "cannot start" in datacenter.output(refused)
    assert datacenter.output(other) == "hello\n"
