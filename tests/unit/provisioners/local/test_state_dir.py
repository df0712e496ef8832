"""The state directory: atomic creation, claims, garbage collection, permissions."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.host import memory, system
from spotfit.model.group import NodeState
from spotfit_provisioners.local.processes import ProcessIdentity, current_process
from spotfit_provisioners.local.state_dir import START_TIMEOUT_S, LocalCloudDir, LocalGroup

DEAD = ProcessIdentity(os.getpid(), "1")


@pytest.fixture
def root(tmp_path: Path) -> LocalCloudDir:
    return LocalCloudDir(tmp_path / "root")


def a_group(root: LocalCloudDir) -> LocalGroup:
    group = root.group(RunId("run"), Token("a"))
    with root.lock():
        group.create([{"number": n} for n in range(2)])
    return group


def test_group_is_created_atomically(root: LocalCloudDir) -> None:
    group = a_group(root)
    assert [node.number for node in group.nodes()] == [0, 1]
    assert [node.read_assignment() for node in group.nodes()] == [{"number": 0}, {"number": 1}]
    assert list(root.groups()) == [group]
    assert (group.run_id, group.token) == ("run", "a")


def test_partial_group_does_not_exist(root: LocalCloudDir) -> None:
    """A partially created group is invisible and can be created again."""
    group = root.group(RunId("run"), Token("a"))
    (root.ensure().path / "run" / ".a" / "node-0").mkdir(parents=True)
    assert not group.exists
    assert list(root.groups()) == []
    assert len(a_group(root).nodes()) == 2


def test_state_is_readable_by_its_user_only(root: LocalCloudDir) -> None:
    group = a_group(root)
    for path in (root.path, *group.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_times_of_a_node_are_those_of_its_records(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    assert (node.status().started_at_ms, node.status().ended_at_ms) == (None, None)
    node.claim(DEAD)
    os.utime(node.path / "machine", ns=(0, 1_500_000_000))
    # The end has not been observed yet.
    assert (node.status().started_at_ms, node.status().ended_at_ms) == (1500, None)
    node.mark_stopped()
    os.utime(node.path / "stopped", ns=(0, 2_500_000_000))
    node.mark_stopped()
    assert (node.status().started_at_ms, node.status().ended_at_ms) == (1500, 2500)
    node.mark_failed("its agent failed")
    os.utime(node.path / "ended", ns=(0, 2_000_000_000))
    assert (node.status().started_at_ms, node.status().ended_at_ms) == (1500, 2000)


def test_exactly_one_machine_claims_a_node(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    assert node.status().state == NodeState.WAITING
    assert node.claim(current_process())
    assert node.claim(current_process())
    assert not node.claim(DEAD)
    assert node.machine() == current_process()
    assert node.status().state == NodeState.RUNNING


def test_node_that_is_never_started_is_gone_after_a_while(root: LocalCloudDir) -> None:
    """Its submitter was killed between the creation of the group and the start of the machine."""
    node = a_group(root).node(0)
    long_ago_ns = (system.wall_ms() - int(START_TIMEOUT_S * 1000)) * 1_000_000
    os.utime(node.path / "assignment", ns=(long_ago_ns, long_ago_ns))
    assert node.status().state == NodeState.GONE
    assert "not started within 20 s" in node.status().reason
    node.renew_assignment()
    assert node.status().state == NodeState.WAITING


def test_node_whose_machine_never_served_has_failed(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    node.output_path.write_text("killed\n")
    node.mark_failed("its process ended")
    assert (node.status().state, node.status().reason) == (
        NodeState.FAILED,
        "its process ended: killed",
    )


def test_directory_that_is_created_after_the_removal_is_no_waiting_node(
    root: LocalCloudDir,
) -> None:
    """An agent that started late creates its scratch directory in that of its node."""
    group = a_group(root)
    with root.lock():
        group.remove()
    group.node(0).scratch_path.mkdir(parents=True)
    assert group.node(0).status().state == NodeState.GONE


@pytest.mark.parametrize("removes_group", [True, False], ids=["group", "node"])
def test_record_that_is_written_during_the_removal_leaves_nothing(
    root: LocalCloudDir, monkeypatch: pytest.MonkeyPatch, removes_group: bool
) -> None:
    """Another process observes the end of the machine that is being cancelled."""
    group = a_group(root)
    rmdir = os.rmdir

    def observed_before(*args: Any, **options: Any) -> None:
        group.node(0).mark_stopped()
        rmdir(*args, **options)

    monkeypatch.setattr(os, "rmdir", observed_before)
    if removes_group:
        with root.lock():
            group.remove()
        assert not (root.path / "run").exists()
    else:
        group.node(0).remove()
        assert [node.number for node in group.nodes()] == [1]


def test_cancelled_node_cannot_be_claimed(root: LocalCloudDir) -> None:
    group = a_group(root)
    with root.lock():
        group.remove()
    assert not group.node(0).claim(current_process())
    assert group.node(0).read_assignment() is None
    assert not (root.path / "run").exists()


def test_reclaimed_node_has_its_reason(root: LocalCloudDir) -> None:
    node = a_group(root).node(0)
    assert node.claim(DEAD)
    assert node.status().state == NodeState.GONE
    node.mark_reclaimed("the price went up")
    assert node.status().reason == "the price went up"


def test_last_machine_removes_directories_of_ended_machines(root: LocalCloudDir) -> None:
    group = a_group(root)
    group.node(0).claim(DEAD)
    group.node(1).claim(current_process())
    group.node(1).remove()
    assert not group.exists
    assert not (root.path / "run").exists()


def test_first_machine_keeps_directories_of_running_machines(root: LocalCloudDir) -> None:
    group = a_group(root)
    group.node(0).claim(current_process())
    group.node(1).claim(current_process())
    group.node(1).remove()
    assert group.node(0).status().state == NodeState.RUNNING
    assert group.node(1).status().state == NodeState.GONE


def test_garbage_collection_keeps_used_directories(root: LocalCloudDir) -> None:
    (root.ensure().machine_dir(current_process()) / "tmp").mkdir(parents=True)
    (root.machine_dir(DEAD) / "tmp").mkdir(parents=True)
    group = a_group(root)
    root.collect_garbage()
    assert root.machines() == [current_process()]
    assert group.exists
    root.remove_machine(current_process())
    with root.lock():
        group.remove()
    root.collect_garbage()
    assert not root.path.exists()


def test_garbage_collection_removes_interrupted_submissions(root: LocalCloudDir) -> None:
    """They contain the run key."""
    draft = root.ensure().path / "run" / ".a" / "node-0"
    draft.mkdir(parents=True)
    (draft / "assignment").touch()
    root.collect_garbage()
    assert not root.path.exists()


def test_waiter_survives_removal_of_the_lock_file(root: LocalCloudDir) -> None:
    with root.lock():
        root.path.joinpath("lock").unlink()
    with root.lock():
        assert root.path.joinpath("lock").exists()


def test_lock_survives_removal_of_the_root(
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


def test_last_set_capacity_applies(root: LocalCloudDir) -> None:
    assert root.capacity() is None
    root.set_capacity(3)
    root.set_capacity(1)
    assert root.capacity() == 1
    root.set_capacity(None)
    assert root.capacity() is None
    assert not root.path.exists(), "the root was empty otherwise"


@pytest.mark.parametrize(
    "left", [f"0 {DEAD}", "0", "nonsense"], ids=["dead process", "no process", "nonsense"]
)
def test_capacity_of_an_ended_process_is_ignored(root: LocalCloudDir, left: str) -> None:
    (root.ensure().path / "capacity").write_text(left)
    assert root.capacity() is None
    root.collect_garbage()
    assert not root.path.exists()


def test_capacity_of_a_running_process_applies(root: LocalCloudDir) -> None:
    root.set_capacity(2)
    root.collect_garbage()
    assert root.capacity() == 2


def test_default_root_is_per_user() -> None:
    assert str(os.getuid()) in LocalCloudDir.default().path.name


def test_snapshots_of_a_killed_machine_are_removed_with_it(
    root: LocalCloudDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIR", tmp_path)
    snapshots = tmp_path / f"spotfit-{os.getuid()}-a-1"
    snapshots.mkdir()
    (snapshots / "owner").write_text(os.uname().nodename)  # and no process holds its lock
    root.machine_dir(current_process()).mkdir(parents=True)
    root.remove_machine(current_process())
    assert not snapshots.exists()
