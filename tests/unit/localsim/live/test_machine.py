"""One machine: it serves a node, leaves it as it should be, and waits for another."""

import os
import subprocess
import sys

import pytest

from spotfit.model.group import NodeState
from spotfit_localsim.live import pool, processes
from tests.unit.localsim.live.stand_in import Town, Up, see_out


def ended(up: Up) -> None:
    up.end()
    see_out(up.told["worker"])


def test_the_next_run_finds_the_machine_waiting(town: Town) -> None:
    first = town.submit("a", 2)
    before = town.next_up()
    see_the_end_of(town, before, first)
    town.submit("b", 2)
    after = town.next_up()
    assert after.machine == before.machine
    assert after.told["token"] == "b"
    for name in ("SPOTFIT_HOST", "SPOTFIT_NOTICE_FILE", "SPOTFIT_SCRATCH"):
        assert after.told["environment"][name] != before.told["environment"][name]
    assert after.told["environment"]["TMPDIR"] == before.told["environment"]["TMPDIR"]


def see_the_end_of(town: Town, up: Up, handle: object) -> None:
    """Its machine leaves the node only when it can already be given the next one."""
    ended(up)
    while not town.observe(handle).over:  # type: ignore[arg-type]  # a handle
        os.sched_yield()


def test_a_machine_is_used_again_only_in_the_environment_it_was_started_in(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = town.submit("a", 2)
    before = town.next_up()
    see_the_end_of(town, before, handle)
    monkeypatch.setenv("FLAVOUR", "salt")
    town.submit("b", 2)
    after = town.next_up()
    assert after.told["environment"]["FLAVOUR"] == "salt"
    see_out(before.machine.pid)  # it would never be of use again


def test_letting_a_reused_machine_go_is_letting_its_second_group_go(town: Town) -> None:
    first = town.submit("a", 2)
    up = town.next_up()
    see_the_end_of(town, up, first)
    second = town.submit("b", 2)
    town.next_up()
    town.provisioner.cancel(first)
    assert town.observe(second).nodes[0].state == NodeState.RUNNING
    town.provisioner.cancel(second)
    see_out(up.machine.pid)


def test_a_machine_that_is_kept_for_no_time_leaves_at_once(town: Town) -> None:
    town.configure(idle_s=0)
    handle = town.submit("a", 2)
    up = town.next_up()
    up.end()
    see_out(up.machine.pid)
    assert town.observe(handle).over
    assert not town.root.path.exists()


def test_a_machine_that_the_run_gave_up_is_gone(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    up.end(code=75)
    see_out(up.machine.pid)
    assert town.observe(handle).nodes[0].state == NodeState.GONE
    assert not town.root.path.exists()


def test_two_machines_of_one_node_are_one(town: Town) -> None:
    """What a submitter started and did not live to note, and what its successor started."""
    town.submit("a", 2)
    up = town.next_up()
    (node,) = [node for group in town.root.groups() for node in group.nodes()]
    command = [sys.executable, "-m", "spotfit_localsim.live.machine", str(node.path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert node.machine() == up.machine
    assert town.quiet()


def test_an_agent_that_cannot_be_loaded_is_told(town: Town) -> None:
    town.configure(agent="nowhere:at_all")
    handle = town.submit("a", 2)
    for machine in town.machines():
        see_out(machine.pid)
    (node,) = town.observe(handle).nodes
    assert node.state == NodeState.FAILED
    assert "No module named 'nowhere'" in node.reason


DRIVER = """
import sys
from pathlib import Path
from tests.unit.localsim.live.stand_in import Town
town = Town(Path(sys.argv[1]))
for token in sys.argv[2:]:
    town.submit(token, 2)
print("submitted", flush=True)
sys.stdin.readline()
"""


def driver(town: Town, *tokens: str) -> subprocess.Popen[str]:
    """Another process that calls fit()."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(town.folder), *tokens],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_waiting_machine_ends_with_its_driver_and_a_training_one_goes_on(town: Town) -> None:
    with driver(town, "a", "b") as other:
        first, second = town.next_up(), town.next_up()
        ended(first)
        other.kill()
    see_out(first.machine.pid)
    assert second.machine.alive
    second.end()
    see_out(second.machine.pid)
    town.root.tidy()
    assert not town.root.path.exists()


def test_a_driver_that_ends_sees_its_machines_out(town: Town) -> None:
    with driver(town, "a") as other:
        assert other.stdout is not None
        up = town.next_up()
        assert other.stdout.readline() == "submitted\n"
        ended(up)
        while town.root.group(town.launch.run_id, up.told["token"]).exists:
            os.sched_yield()
        other.communicate("\n")
    assert not up.machine.alive
    assert not town.root.path.exists()


def test_nobody_is_served_by_the_machine_of_another_driver(town: Town) -> None:
    with driver(town, "a") as other:
        theirs = town.next_up()
        ended(theirs)
        town.submit("b", 2)
        assert town.next_up().machine != theirs.machine
        other.communicate("\n")


def test_a_machine_s_own_requests_are_its_driver_s(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader orders a replacement: the new machine belongs to the driver, in its environment."""
    handle = town.submit("a", 2)
    first = town.next_up()
    monkeypatch.setenv(pool.OWNER, str(processes.here()))
    monkeypatch.setenv(pool.ROOT, str(town.root.path))
    monkeypatch.setenv(pool.TMPDIR, "")
    monkeypatch.setenv("TMPDIR", first.told["environment"]["TMPDIR"])
    replacement = town.submit("b", 2)
    second = town.next_up()
    assert second.told["environment"]["TMPDIR"] != first.told["environment"]["TMPDIR"]
    for name in (pool.OWNER, pool.ROOT, pool.TMPDIR, "TMPDIR"):
        monkeypatch.delenv(name)
    see_the_end_of(town, second, replacement)
    town.submit("c", 2)
    assert town.next_up().machine == second.machine
    town.provisioner.cancel(handle)
