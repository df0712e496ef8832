"""Directories as facts: whole or absent, and nobody else's."""

import os
import stat
from pathlib import Path

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.model.group import NodeState
from spotfit_provisioners.local.processes import ProcessIdentity, current_process
from spotfit_provisioners.local.state_dir import LocalCloudDir, LocalGroup

DEAD = ProcessIdentity(os.getpid(), "1")


@pytest.fixture
def root(tmp_path: Path) -> LocalCloudDir:
    return LocalCloudDir(tmp_path / "root")


def a_group(root: LocalCloudDir) -> LocalGroup:
    group = root.group(RunId("run"), Token("a"))
    with root.lock():
        group.create([{"number": n} for n in range(2)])
    return group


def test_a_group_appears_whole(root: LocalCloudDir) -> None:
    group = a_group(root)
    assert [node.number for node in group.nodes()] == [0, 1]
    assert [node.read_assignment() for node in group.nodes()] == [{"number": 0}, {"number": 1}]
    assert list(root.groups()) == [group]
    assert (group.run_id, group.token) == ("run", "a")


def test_half_a_group_was_never_there(root: LocalCloudDir) -> None:
    """Somebody died while making it: nobody sees it, and it can be made again."""
    group = root.group(RunId("run"), Token("a"))
    (root.ensure().path / "run" / ".a" / "node-0").mkdir(parents=True)
    assert not group.exists
    assert list(root.groups()) == []
    assert len(a_group(root).nodes()) == 2


def test_what_lies_there_is_for_its_user_only(root: LocalCloudDir) -> None:
    group = a_group(root)
    for path in (root.path, *group.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_of_many_machines_one_gets_the_node(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    assert node.status().state == NodeState.WAITING
    assert node.claim(current_process())
    assert node.claim(current_process())
    assert not node.claim(DEAD)
    assert node.machine() == current_process()
    assert node.status().state == NodeState.RUNNING


def test_a_node_that_was_cancelled_cannot_be_claimed(root: LocalCloudDir) -> None:
    group = a_group(root)
    group.remove()
    assert not group.node(0).claim(current_process())
    assert group.node(0).read_assignment() is None
    assert not (root.path / "run").exists()


def test_a_reclaimed_node_says_why_it_is_gone(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    assert node.claim(DEAD)
    assert node.status().state == NodeState.GONE
    node.mark_reclaimed("the price went up")
    assert node.status().reason == "the price went up"


def test_the_last_to_leave_takes_the_dead_with_it(root: LocalCloudDir) -> None:
    group = a_group(root)
    group.node(0).claim(DEAD)
    group.node(1).claim(current_process())
    group.node(1).remove()
    assert not group.exists
    assert not (root.path / "run").exists()


def test_who_leaves_first_does_not_take_the_living_with_it(root: LocalCloudDir) -> None:
    group = a_group(root)
    group.node(0).claim(current_process())
    group.node(1).claim(current_process())
    group.node(1).remove()
    assert group.node(0).status().state == NodeState.RUNNING
    assert group.node(1).status().state == NodeState.GONE


def test_tidying_leaves_what_is_in_use(root: LocalCloudDir) -> None:
    (root.ensure().machine_dir(current_process()) / "tmp").mkdir(parents=True)
    (root.machine_dir(DEAD) / "tmp").mkdir(parents=True)
    group = a_group(root)
    root.collect_garbage()
    assert root.machines() == [current_process()]
    assert group.exists
    root.remove_machine(current_process())
    group.remove()
    root.collect_garbage()
    assert not root.path.exists()


def test_the_lock_may_be_tidied_away_under_one_who_waits(root: LocalCloudDir) -> None:
    with root.lock():
        root.path.joinpath("lock").unlink()
    with root.lock():
        assert root.path.joinpath("lock").exists()


def test_the_root_may_be_tidied_away_under_one_who_is_about_to_lock(
    root: LocalCloudDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def too_late(path: Path, *how: int) -> int:
        monkeypatch.undo()
        root.path.rmdir()
        return opened(path, *how)

    monkeypatch.setattr(os, "open", too_late)
    with root.lock():
        assert root.path.is_dir()


def test_capacity_is_what_was_said_last(root: LocalCloudDir) -> None:
    assert root.capacity() is None
    root.set_capacity(3)
    root.set_capacity(1)
    assert root.capacity() == 1
    root.set_capacity(None)
    assert root.capacity() is None
    assert not root.path.exists(), "nothing else was in it"


@pytest.mark.parametrize("left", [f"0 {DEAD}", "0", "nonsense"])
def test_what_a_dead_reclaimer_said_is_forgotten(root: LocalCloudDir, left: str) -> None:
    (root.ensure().path / "capacity").write_text(left)
    assert root.capacity() is None
    root.collect_garbage()
    assert not root.path.exists()


def test_what_a_living_one_said_is_kept(root: LocalCloudDir) -> None:
    root.set_capacity(2)
    root.collect_garbage()
    assert root.capacity() == 2


def test_a_user_has_one_root() -> None:
    assert str(os.getuid()) in LocalCloudDir.default().path.name
