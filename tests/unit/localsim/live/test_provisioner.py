"""This machine as a cloud: tokens are honoured, deaths are seen, nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit_localsim.live import processes
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Root
from spotfit_localsim.live.provisioner import LocalProvisioner
from tests.unit.localsim.live.stand_in import SECRET, Town, see_out


def states(town: Town, handle: object) -> list[NodeState]:
    return [node.state for node in town.observe(handle).nodes]  # type: ignore[arg-type]  # a handle


@pytest.mark.parametrize(
    ("nodes", "workers", "of", "expected"),
    [(1, 4, 4, (1, 4)), (2, 4, 4, (2, 2)), (2, 2, 4, (1, 2)), (3, 4, 4, (2, 2)), (2, 1, 4, (1, 2))],
)
def test_a_run_is_cut_into_equal_nodes(
    nodes: int, workers: int, of: int, expected: tuple[int, int]
) -> None:
    local = LocalProvisioner(LocalOptions(nodes=nodes))
    request = GroupRequest(Token("t"), workers, of)
    plan = local.plan(request)
    assert (plan.nodes, plan.slots) == expected
    assert local.plan(request) == plan


@pytest.mark.parametrize(
    "request_", [GroupRequest(Token("../t"), 1, 1), GroupRequest(Token("t"), 0, 1)]
)
def test_what_cannot_be_meant_is_refused(request_: GroupRequest) -> None:
    with pytest.raises(ConfigError):
        LocalProvisioner().plan(request_)


def test_every_node_is_a_group_of_processes_of_its_own(town: Town) -> None:
    handle = town.submit("a", 4)
    first, second = town.next_up(), town.next_up()
    assert {first.told["node"], second.told["node"]} == {0, 1}
    assert first.told["group"] == first.machine.pid != second.told["group"]
    assert os.getsid(first.machine.pid) == first.machine.pid
    assert states(town, handle) == [NodeState.RUNNING, NodeState.RUNNING]
    hosts = {up.told["environment"]["SPOTFIT_HOST"] for up in (first, second)}
    assert len(hosts) == 2
    assert all(host.startswith("127.0.") for host in hosts)


def test_machines_are_nobodys_children(town: Town) -> None:
    town.submit("a", 2)
    assert town.next_up().machine.pid not in processes.descendants(os.getpid())


def test_the_secret_is_on_no_command_line_and_in_no_file(town: Town) -> None:
    town.submit("a", 2)
    up = town.next_up()
    assert up.told["secret"] == SECRET
    assert not any(SECRET in word for word in up.told["argv"])
    assert SECRET.encode() not in Path(f"/proc/{up.machine.pid}/environ").read_bytes()
    files = (path for path in town.root.path.rglob("*") if path.is_file())
    assert not [path for path in files if SECRET in path.read_text(errors="replace")]


def test_asking_twice_is_asking_once(town: Town) -> None:
    assert town.submit("a", 4) == town.submit("a", 4)
    machines = {town.next_up().machine, town.next_up().machine}
    assert town.submit("a", 4).name == "run/a"
    assert town.quiet()
    assert {node.machine() for group in town.root.groups() for node in group.nodes()} == machines


def test_asking_from_many_processes_at_once_is_asking_once(town: Town) -> None:
    ask = (
        "from spotfit.core.ids import RunId, Token\n"
        "from spotfit.model.group import GroupRequest\n"
        "from spotfit.provision.launch import Launch\n"
        "from spotfit_localsim.live.options import LocalOptions\n"
        "from spotfit_localsim.live.provisioner import LocalProvisioner\n"
        "import sys\n"
        "local = LocalProvisioner(LocalOptions(nodes=2, root=sys.argv[1], agent=sys.argv[2]))\n"
        "launch = Launch(sys.argv[3], RunId('run'), 'key')\n"
        "local.submit(local.plan(GroupRequest(Token('a'), 4, 4)), launch)\n"
    )
    command = [
        sys.executable,
        "-c",
        ask,
        str(town.root.path),
        town.provisioner.options.agent,
        str(town.folder),
    ]
    asking = [subprocess.Popen(command) for _ in range(4)]
    assert [one.wait() for one in asking] == [0, 0, 0, 0]
    ups = [town.next_up(), town.next_up()]
    assert sorted(up.told["node"] for up in ups) == [0, 1]
    assert town.quiet()


def test_whoever_dies_while_asking_is_finished_by_the_next(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dies after the second node's directory, before its machine."""
    started: list[int] = []
    start = processes.start_detached

    def dying(*args: object, **kwargs: object) -> object:
        if started:
            raise KeyboardInterrupt
        started.append(1)
        return start(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    with monkeypatch.context() as patch:
        patch.setattr(processes, "start_detached", dying)
        with pytest.raises(KeyboardInterrupt):
            town.submit("a", 4)
    before = town.next_up()
    town.submit("a", 4)
    after = town.next_up()
    assert {before.told["node"], after.told["node"]} == {0, 1}
    assert before.machine.alive
    assert town.quiet()


def test_a_machine_that_was_started_and_not_noted_is_not_started_again(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submitter died between the two; the successor starts another one, which lets it be."""
    start = processes.start_detached
    monkeypatch.setattr(processes, "start_detached", lambda *a, **k: start(*a, **k) and None)
    town.submit("a", 2)
    town.submit("a", 2)
    up = town.next_up()
    other = [one for one in town.root.machines() if one != up.machine]
    for process in other:
        see_out(process.pid)
    assert town.quiet()
    assert states(town, town.submit("a", 2)) == [NodeState.RUNNING]


def test_a_killed_machine_is_gone_and_so_is_all_it_started(town: Town) -> None:
    handle = town.submit("a", 4)
    up = town.next_up()
    processes.kill(up.machine)
    see_out(up.machine.pid)
    see_out(up.told["worker"])
    expected = {up.told["node"]: NodeState.GONE, 1 - up.told["node"]: NodeState.RUNNING}
    assert states(town, handle) == [expected[0], expected[1]]
    assert up.machine not in town.root.machines()


def test_a_pid_that_is_given_out_again_is_not_mistaken(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    node = next(town.root.groups()).node(0)
    processes.kill(up.machine)
    (node.path / "machine").write_text(f"{os.getpid()}-1")
    assert states(town, handle) == [NodeState.GONE]
    town.provisioner.cancel(handle)  # and this process lives on


def test_an_agent_that_fails_is_told_with_its_last_words(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    up.end(code=3)
    see_out(up.machine.pid)
    (node,) = town.observe(handle).nodes
    assert node.state == NodeState.FAILED
    assert "code 3" in node.reason
    assert "the stand-in ends" in node.reason


def test_what_a_machine_printed_is_there_until_its_group_is_let_go(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    up.end(code=3)
    see_out(up.machine.pid)
    town.observe(handle)
    (life,) = town.provisioner.said(handle, 0, last=1)
    assert Path(life.where).is_file()
    assert life.lines == ("the stand-in ends with code 3",)
    assert town.provisioner.said(handle, 0, last=0)[0].lines == ()
    town.provisioner.cancel(handle)
    assert town.provisioner.said(handle, 0, last=1) == []


def test_an_agent_that_ends_well_leaves_nothing(town: Town) -> None:
    handle = town.submit("a", 4)
    ups = [town.next_up(), town.next_up()]
    for up in ups:
        up.end()
    town.provisioner.cancel(handle)
    for up in ups:
        processes.kill(up.machine)
        see_out(up.machine.pid)
    assert states(town, handle) == [NodeState.GONE, NodeState.GONE]
    town.root.tidy()
    assert not town.root.path.exists()


def test_letting_go_kills_everything_and_may_be_repeated(town: Town) -> None:
    handle = town.submit("a", 4)
    ups = [town.next_up(), town.next_up()]
    town.provisioner.cancel(handle)
    town.provisioner.cancel(handle)
    for up in ups:
        see_out(up.machine.pid)
        see_out(up.told["worker"])
    assert town.observe(handle).over
    town.root.tidy()
    assert not town.root.path.exists()


def test_letting_go_ends_a_machine_that_is_frozen(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    os.kill(up.machine.pid, signal.SIGSTOP)
    town.provisioner.cancel(handle)
    see_out(up.machine.pid)


def test_a_group_nobody_remembers_is_gone(town: Town) -> None:
    handle = town.submit("a", 4)
    town.provisioner.cancel(handle)
    assert states(town, handle) == [NodeState.GONE, NodeState.GONE]


def test_the_cloud_may_have_less_than_was_asked_for(town: Town) -> None:
    town.root.limit(1)
    plan = town.provisioner.plan(GroupRequest(Token("a"), 4, 4))
    refusal = town.provisioner.submit(plan, town.launch)
    assert isinstance(refusal, Refusal)
    assert "1 of 1" in refusal.why
    town.submit("b", 2)
    assert isinstance(town.provisioner.submit(plan, town.launch), Refusal)
    town.submit("b", 2)  # what was given before is not refused now
    town.root.limit(None)
    town.submit("a", 4)


def test_a_dead_node_makes_room(town: Town) -> None:
    town.root.limit(1)
    town.submit("a", 2)
    machine = town.next_up().machine
    processes.kill(machine)
    see_out(machine.pid)
    town.submit("b", 2)


def test_two_runs_do_not_meet(town: Town) -> None:
    town.submit("a", 2)
    town.launch = type(town.launch)(str(town.folder), RunId("other"), SECRET)
    town.submit("a", 2)
    assert town.next_up().machine != town.next_up().machine


def test_a_root_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ProvisionPermissionError, match="this user alone"):
        Root(tmp_path).open()
    tmp_path.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        Root(tmp_path).open()
