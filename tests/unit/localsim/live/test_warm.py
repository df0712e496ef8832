"""Machines that are begun before a run is written down: taken by it, or gone without a trace."""

import os
import signal
import subprocess
import sys

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest, NodeState
from spotfit_localsim.live import processes, warm
from spotfit_localsim.live.processes import Process
from tests.unit.localsim.live.stand_in import SECRET, Town, see_out

FRAMEWORK = "none"


def plan(town: Town, workers: int = 4) -> GroupPlan:
    return town.provisioner.plan(GroupRequest(Token("t-preflight"), workers, 4))


def waiting(town: Town) -> set[Process]:
    return {one.process for one in warm._waiting if one.root == town.root}


def test_a_run_takes_the_machines_that_were_begun_for_it(town: Town) -> None:
    with town.provisioner.warming(plan(town), FRAMEWORK):
        begun = waiting(town)
        assert len(begun) == 2
        handle = town.submit("a", 4)
        assert not waiting(town)
    ups = [town.next_up(), town.next_up()]
    assert {up.machine for up in ups} == begun
    assert sorted(up.told["node"] for up in ups) == [0, 1]
    assert [node.state for node in town.observe(handle).nodes] == [NodeState.RUNNING] * 2


def test_a_warm_machine_serves_as_any_other(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAVOUR", "salt")
    with town.provisioner.warming(plan(town, 2), FRAMEWORK):
        town.submit("a", 2)
    up = town.next_up()
    assert up.told["secret"] == SECRET
    assert SECRET not in " ".join(up.told["argv"])
    assert up.told["environment"]["FLAVOUR"] == "salt"
    assert up.told["environment"]["TMPDIR"].startswith(str(town.root.home(up.machine)))
    assert up.told["environment"]["SPOTFIT_NOTICE_FILE"].startswith(str(town.root.path))
    up.end()
    town.submit("b", 2)
    assert town.next_up().told["token"] == "b"


def test_those_that_nobody_took_leave_nothing_behind(town: Town) -> None:
    with town.provisioner.warming(plan(town), FRAMEWORK):
        begun = waiting(town)
    assert begun
    for machine in begun:
        see_out(machine.pid)
    assert not town.root.path.exists()


def test_an_error_on_the_way_lets_them_go(town: Town) -> None:
    begun: set[Process] = set()

    def interrupted() -> None:
        with town.provisioner.warming(plan(town), FRAMEWORK):
            begun.update(waiting(town))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert begun
    for machine in begun:
        see_out(machine.pid)


def test_they_die_with_their_driver(town: Town) -> None:
    driver = (
        "import sys, time\n"
        "from spotfit.core.ids import Token\n"
        "from spotfit.model.group import GroupRequest\n"
        "from spotfit_localsim.live import warm\n"
        "from spotfit_localsim.live.provisioner import LocalProvisioner\n"
        "local = LocalProvisioner(nodes=2, root=sys.argv[1])\n"
        "plan = local.plan(GroupRequest(Token('t'), 4, 4))\n"
        "with local.warming(plan, 'none'):\n"
        "    print(*[one.process.pid for one in warm._waiting], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", driver, str(town.root.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stdout is not None
        begun = [int(pid) for pid in asked.stdout.readline().split()]
        assert len(begun) == 2
        asked.send_signal(signal.SIGKILL)
    for pid in begun:
        see_out(pid)
    assert not town.root.path.exists()


def test_one_whose_root_was_tidied_away_makes_it_as_it_should_be(town: Town) -> None:
    """Its driver died at once, and the next one found nothing of use there. Chaos seed 6000002."""
    words = [*warm.MACHINE, warm.WAIT, str(town.root.path), "2", FRAMEWORK]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as machine:
        while not any((home / "tmp").exists() for home in town.root.path.glob("machines/*")):
            assert machine.poll() is None
            os.sched_yield()
        town.root.open()  # it raises for a root that others can enter
        machine.communicate()
    assert machine.returncode == 0
    assert not town.root.path.exists()


def test_one_of_another_environment_is_not_taken(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town.provisioner.warming(plan(town, 2), FRAMEWORK):
        (begun,) = waiting(town)
        monkeypatch.setenv("FLAVOUR", "salt")
        town.submit("a", 2)
    up = town.next_up()
    assert up.machine != begun
    assert up.told["environment"]["FLAVOUR"] == "salt"
    see_out(begun.pid)


def test_one_that_has_died_is_not_missed(town: Town) -> None:
    with town.provisioner.warming(plan(town, 2), FRAMEWORK):
        (begun,) = waiting(town)
        processes.kill(begun)
        see_out(begun.pid)
        handle = town.submit("a", 2)
    assert town.next_up().machine != begun
    assert town.observe(handle).nodes[0].state == NodeState.RUNNING


def test_none_are_begun_where_there_is_no_room(town: Town) -> None:
    town.configure(capacity=1)
    with town.provisioner.warming(plan(town), FRAMEWORK):
        assert not waiting(town)


def test_none_are_begun_where_machines_stand_already(town: Town) -> None:
    town.submit("a", 2)
    town.next_up()
    with town.provisioner.warming(plan(town), FRAMEWORK):
        assert not waiting(town)


def test_a_machine_of_a_driver_begins_none(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_LOCAL_OWNER", f"{os.getppid()}-1")
    with town.provisioner.warming(plan(town), FRAMEWORK):
        assert not waiting(town)
