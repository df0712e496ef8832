"""Machines as processes: boot, command, signals, stop, preemption, restart of the simulator."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds.capacity import MarketOptions, RealTimeMarket
from spotfit_localsim.clouds.cloud_host import (
    ENDED,
    LOST,
    SIM_ROOT_ENV,
    STOPPED,
    Datacenter,
    SimulatedMachine,
)
from spotfit_provisioners.local.processes import ProcessIdentity

pytestmark = pytest.mark.real_time("machines are real processes")

SLEEPS = ["/bin/sh", "-c", "exec sleep 100"]
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]


def a_tide(**options: float) -> RealTimeMarket:
    return RealTimeMarket(MarketOptions(**{"boot_s": 0.0, **options}), started_s=0.0)  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Datacenter]:
    site = Datacenter(tmp_path, a_tide(notice_s=0.3))
    yield site
    site.close()


def until(site: Datacenter, happens: Callable[[], object]) -> None:
    clock = SystemClock()
    give_up_at = clock.now() + 20
    while not happens():
        assert clock.now() < give_up_at
        site.tick()
        clock.wait(0.01)


def rented(site: Datacenter, command: list[str], **environment: str) -> SimulatedMachine:
    machine = site.rent("task", command, environment)
    assert machine is not None
    return machine


def test_a_machine_runs_its_command_and_ends_with_its_code(site: Datacenter) -> None:
    machine = rented(
        site, ["/bin/sh", "-c", 'echo "hello $WHO from $SPOTFIT_HOST"; exit 3'], WHO="x"
    )
    assert machine.state == "booting"
    until(site, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 3)
    assert site.output(machine) == f"hello x from {machine.address}\n"


def test_what_is_ours_does_not_reach_a_machine_unless_it_was_given(
    site: Datacenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "not for you")
    machine = rented(site, ["/bin/sh", "-c", "env"])
    until(site, lambda: not machine.is_active)
    told = site.output(machine)
    assert "not for you" not in told
    assert f"{SIM_ROOT_ENV}={site.root}" in told
    assert f"PATH={Path(sys.executable).parent}:" in told, "the Python of an image is ours"


def test_who_is_stopped_may_end_by_itself_within_its_grace(site: Datacenter) -> None:
    machine = rented(
        site, ["/bin/sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.02; done"]
    )
    until(site, lambda: "up" in site.output(machine))
    site.stop(machine, grace_s=20)
    until(site, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 9)


def test_who_will_not_end_is_killed_when_the_grace_is_over(site: Datacenter) -> None:
    machine = rented(site, STUBBORN)
    until(site, lambda: "up" in site.output(machine))
    process = ProcessIdentity.parse(machine.pid)
    assert process is not None
    site.stop(machine, grace_s=0.1)
    until(site, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (STOPPED, None)
    assert not process.is_alive


def test_a_machine_that_still_boots_is_stopped_at_once(tmp_path: Path) -> None:
    site = Datacenter(tmp_path, a_tide(boot_s=1000.0))
    machine = rented(site, SLEEPS)
    site.stop(machine, grace_s=20)
    assert (machine.state, machine.end_reason) == ("over", STOPPED)


def test_without_notice_a_machine_is_gone_at_once(site: Datacenter) -> None:
    machine = rented(site, SLEEPS)
    until(site, lambda: machine.state == "up")
    site.reclaim(machine, notice=False)
    assert machine.was_reclaimed
    assert machine.exit_code is None


def test_with_notice_it_lives_until_the_notice_is_over(site: Datacenter) -> None:
    machine = rented(site, STUBBORN)
    until(site, lambda: "up" in site.output(machine))
    site.reclaim(machine, notice=True)
    assert machine.is_active
    assert machine.kill_due_s is not None
    until(site, lambda: not machine.is_active)
    assert machine.was_reclaimed


def test_a_notice_protects_nobody_from_being_taken_at_once(site: Datacenter) -> None:
    machine = rented(site, STUBBORN)
    until(site, lambda: "up" in site.output(machine))
    site.reclaim(machine, notice=True)
    site.reclaim(machine, notice=True)
    assert machine.is_active
    site.reclaim(machine, notice=False)
    assert machine.was_reclaimed


def test_who_leaves_after_its_notice_has_ended_by_itself(site: Datacenter) -> None:
    machine = rented(
        site, ["/bin/sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.02; done; exit 75"]
    )
    until(site, lambda: "up" in site.output(machine))
    site.reclaim(machine, notice=True)
    (site.root / "machines" / "000001" / "go").touch()
    until(site, lambda: not machine.is_active)
    assert machine.exit_code == 75
    assert not machine.was_reclaimed


def test_a_command_that_is_killed_from_outside_is_told_apart(site: Datacenter) -> None:
    machine = rented(site, ["/bin/sh", "-c", "echo up; exec sleep 100"])
    until(site, lambda: "up" in site.output(machine))
    site.send_signal(machine, signal.SIGKILL)
    until(site, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (ENDED, 137)


def test_a_machine_whose_every_process_is_gone_is_lost(site: Datacenter) -> None:
    machine = rented(site, SLEEPS)
    until(site, lambda: machine.state == "up")
    process = ProcessIdentity.parse(machine.pid)
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    until(site, lambda: not machine.is_active)
    assert (machine.end_reason, machine.exit_code) == (LOST, None)


def test_there_are_no_more_machines_than_the_market_gives(tmp_path: Path) -> None:
    tide = a_tide()
    site = Datacenter(tmp_path, tide)
    tide.max_machines = 2
    first, second = (rented(site, SLEEPS) for _ in range(2))
    assert site.rent("third", SLEEPS, {}) is None
    until(site, lambda: second.state == "up")
    tide.max_machines = 1
    first.gets_notice = second.gets_notice = False
    site.tick()
    assert first.is_active
    assert second.was_reclaimed, "the youngest goes first"
    site.close()


def test_a_site_that_is_opened_again_knows_its_machines(site: Datacenter) -> None:
    machine = rented(site, STUBBORN)
    until(site, lambda: "up" in site.output(machine))
    again = Datacenter.open(site.root, a_tide())
    found = again.find_machine("task")
    assert found == machine
    again.tick()
    assert found is not None
    assert found.is_active
    again.reclaim(found, notice=False)
    assert found.was_reclaimed
    assert again.rent("next", SLEEPS, {}).number == machine.number + 1  # type: ignore[union-attr]
    again.remove(found)
    assert not (site.root / "machines" / "000001").exists()
    again.close()


def test_concurrent_preemptions_of_a_machine_end_it_once(site: Datacenter) -> None:
    machine = rented(site, SLEEPS)
    until(site, lambda: machine.state == "up")
    ended: list[SimulatedMachine] = []
    other = threading.Thread(target=site.reclaim, args=[machine], kwargs={"notice": False})

    def end(machine: SimulatedMachine) -> None:
        ended.append(machine)
        if not other.is_alive():
            other.start()
            # The other thread must wait until this one is done.
            other.join(0.2)

    site.hooks.close_metadata = end
    site.reclaim(machine, notice=False)
    other.join()
    assert ended == [machine]
