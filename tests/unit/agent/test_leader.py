"""Tests of the leader: callbacks, hooks, checkpoints, and the end of rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.manifest import Manifest, manifests_of_all
from spotfit.checkpoint.writer import save_existing_files
from spotfit.control.background_calls import BackgroundResult
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.ledger import keys
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    FailureCause,
    FitEnded,
    LeaderElected,
    NodeLost,
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationRequest,
)
from spotfit.model.leader_state import UserCodeError
from spotfit.model.spec import FailureLimits, RetentionConfig, ValidationSpec
from spotfit.protocol.agent_sidecar import CallWorkers
from spotfit.protocol.worker_agent import (
    AtGate,
    CallFunction,
    CallResult,
    CheckpointCorrupt,
    CheckpointNamed,
    FilesReport,
    MetricsReport,
    OpenGate,
    RankZeroBroadcast,
    RequestFinalSave,
    SaveCompleted,
    SaveFailed,
    WorkerReturned,
)
from tests.unit.agent.simulated_cluster import TEMPO, FakeCluster

ANY_FAILURES = FailureLimits(worker=-1)
NO_METRICS = msgspec.Raw(b"{}")


def saved_by_rank_0(world: FakeCluster, name: str, report: int = 0) -> None:
    """The files of a checkpoint, and their manifest, as a worker leaves them."""
    world.store.put(f"{name}/model", b"weights")
    part = Manifest(
        name=name, round=1, report_index=report, rank=0, ranks=(0,), metrics={"loss": 1.0}, files=()
    )
    world.store.put(keys.manifest(name, 1, 0), encode(part))


# --- reports -------------------------------------------------------------------------------------


def test_callbacks_receive_all_reports_in_order() -> None:
    world = FakeCluster(has_callbacks=True)
    world.wait_for_round()
    world.report(0, loss=3)
    world.checkpoint(1, "c1", loss=2)
    world.report(2, loss=1)
    assert world.callback_runner.reports == [
        ([{"rank": 0, "loss": 3}, {"rank": 1, "loss": 3}], None),
        ([{"rank": 0, "loss": 2}, {"rank": 1, "loss": 2}], "c1"),
        ([{"rank": 0, "loss": 1}, {"rank": 1, "loss": 1}], None),
    ]


def test_callbacks_receive_a_checkpoint_after_its_commit() -> None:
    world = FakeCluster(has_callbacks=True)
    world.wait_for_round()
    world.store.should_fail = lambda: True
    world.checkpoint(0, "c1")
    assert world.callback_runner.reports == []
    world.store.should_fail = lambda: False
    world.advance_until(lambda: world.callback_runner.reports)
    assert world.callback_runner.reports[0][1] == "c1"


def test_callbacks_receive_checkpoints_committed_at_the_end_of_a_round() -> None:
    world = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b'{"rank":1}')))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b'{"rank":0}'), checkpoint_dir_name="c1")
    )
    world.store.should_fail = lambda: True
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=1))
    world.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    world.advance(1.0)
    world.store.should_fail = lambda: False
    world.advance_until(lambda: world.last_event(RoundClosed))
    assert world.last_event(CheckpointCommitted).name == "c1"
    assert world.callback_runner.reports == [([{"rank": 0}, {"rank": 1}], "c1")]


def test_reports_that_waited_for_an_upload_are_delivered_if_they_count() -> None:
    world = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.report(0, first_rank=1)
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c0")
    )
    world.checkpoint(1, "c1")
    world.report(2)
    assert world.callback_runner.reports == [], "c0 is not complete"
    for n, name in enumerate(("c0", "c1")):
        saved_by_rank_0(world, name, report=n)
    world.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    world.advance_until(lambda: world.last_event(RoundOpened).round.number == 2)
    assert world.last_event(RoundOpened).round.checkpoint_name == "c1"
    assert [checkpoint for _, checkpoint in world.callback_runner.reports] == ["c0", "c1"]
    world.report(0)
    assert len(world.callback_runner.reports) == 3, "the last report was made again"


def test_reports_that_wait_for_an_upload_are_stored_at_a_change_of_the_leader() -> None:
    world = FakeCluster()
    world.wait_for_round()
    old = world.leader.agent_id
    world.report(0)
    for rank in (0, 1):
        snapshot = FilesReport(report_index=1, metrics=NO_METRICS, incremental=True, step=5)
        world.send_from_worker(rank, snapshot)
    other = next(node for node in world.nodes.values() if node.agent_id != old)
    world.append(
        LeaderElected(
            leader=other.agent_id,
            epoch=world.view.epoch + 1,
            coordinator_address=other.agent_id,
        )
    )
    world.advance(0.5)
    assert world.last_event(LeaderElected).leader == other.agent_id
    # The first chunk is less than a second old: the second one must not wait for its successor.
    lines = [world.read_object(one.key) for one in world.store.list(f".spotfit/reports/{old}")]
    stored = [msgspec.json.decode(line) for line in lines]
    assert [(one["report_index"], one["checkpoint"]) for one in stored] == [(0, None), (1, None)]


def test_a_checkpoint_is_committed_after_the_reports_before_it_are_stored() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.report(0)
    world.settle()
    world.report(1)  # the chunk with it is due in a second
    world.checkpoint(2, "c2")
    took_s = world.advance_until(lambda: world.last_event(CheckpointCommitted))
    stored = b"".join(
        world.read_object(one.key) for one in world.store.list(".spotfit/reports")
    ).splitlines()
    assert [msgspec.json.decode(line)["report_index"] for line in stored][:2] == [0, 1]
    assert took_s < 0.5


def hold_report_writes(world: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket does not answer the leader's writes of reports."""
    calls = world.leader.node_services.stallable_calls
    run = calls.run

    def hold_reports(name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        return None if name.startswith(".spotfit/reports") else run(name, job)

    monkeypatch.setattr(calls, "run", hold_reports)


def test_a_commit_waits_for_the_reports_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeCluster()
    world.wait_for_round()
    hold_report_writes(world, monkeypatch)
    world.report(0)
    world.checkpoint(1, "c1")
    world.advance(5.0)
    assert world.events_of(CheckpointCommitted) == []
    monkeypatch.undo()
    world.advance_until(lambda: world.last_event(CheckpointCommitted))


def test_a_failing_round_does_not_wait_for_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    hold_report_writes(world, monkeypatch)
    world.report(0)
    world.checkpoint(1, "c1")
    world.fail_rank(1)
    world.advance_until(lambda: world.last_event(RoundOpened).round.number == 2)
    assert world.last_event(RoundOpened).round.checkpoint_name == "c1"


def test_a_cancelled_run_saves_first() -> None:
    world = FakeCluster()
    world.wait_for_round()
    for rank in (0, 1):
        world.send_from_worker(rank, RankZeroBroadcast(kind="Checkpointer", seq=0))
    world.append(CancelRequested(reason="enough", save=True))
    world.advance_until(lambda: world.messages_to(1, RequestFinalSave))
    assert world.messages_to(0, RequestFinalSave) == [RequestFinalSave(reason="enough")]
    world.advance(10.0)
    assert world.view.fit_end is None
    for rank in (0, 1):
        snapshot = FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), incremental=True)
        world.send_from_worker(rank, snapshot)
    for rank in (0, 1):
        (named,) = world.messages_to(rank, CheckpointNamed)
        saved = SaveCompleted(report_index=0, checkpoint_name=named.checkpoint_name, step=3)
        world.send_from_worker(rank, saved)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(CheckpointCommitted).step == 3
    assert world.last_event(FitEnded).outcome == "cancelled"


def test_a_run_without_a_checkpointer_is_cancelled_at_once() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.append(CancelRequested(reason="enough", save=True))
    world.advance(1.0)
    assert world.last_event(FitEnded).outcome == "cancelled"


def test_callbacks_receive_failures_by_rank() -> None:
    world = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.fail_rank(1, "KeyError: 'x'")
    world.advance_until(lambda: world.callback_runner.failures)
    assert world.callback_runner.failures == [{1: "Traceback\nKeyError: 'x'"}]


def test_a_callback_that_raises_ends_the_run() -> None:
    world = FakeCluster(has_callbacks=True)
    world.wait_for_round()
    world.callback_runner.error_text = "Traceback\nKeyError: 'x'"
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.PLATFORM)
    assert ended.failures[0].message == "Traceback\nKeyError: 'x'"


def test_the_run_ends_after_callbacks_processed_all_reports() -> None:
    world = FakeCluster(has_callbacks=True)
    world.wait_for_round()
    world.callback_runner.is_idle = False
    world.finish_rank(1)
    world.finish_rank(0)
    world.advance(2.0)
    assert world.view.is_active
    world.callback_runner.is_idle = True
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).outcome == "finished"


# --- a backend's hooks ---------------------------------------------------------------------------


def hooks_done(world: FakeCluster) -> None:
    world.hooks.unfinished = []
    world.advance(0.2)


def to_training(world: FakeCluster) -> None:
    """All workers have come through the hooks before the function."""
    world.wait_for_round()
    for stage in ("setup", "train"):
        for rank in (0, 1):
            world.send_from_worker(rank, AtGate(phase=stage))
        hooks_done(world)


def test_hooks_and_workers_wait_for_each_other_at_the_gates() -> None:
    world = FakeCluster(has_backend_hooks=True)
    world.wait_for_round()
    world.send_from_worker(0, AtGate(phase="setup"))
    assert world.hooks.requested == []
    world.send_from_worker(1, AtGate(phase="setup"))
    assert world.hooks.requested == [("on_start", 1, 2)]
    assert world.messages_to(0, OpenGate) == []
    hooks_done(world)
    assert (
        world.messages_to(0, OpenGate)
        == world.messages_to(1, OpenGate)
        == [OpenGate(phase="setup")]
    )


def test_worker_calls_of_hooks_pass_through_the_leader() -> None:
    world = FakeCluster(has_backend_hooks=True)
    world.wait_for_round()
    world.hooks.calls = [CallWorkers(round=1, call_id=7, ranks=(1,), pickled_call=b"call")]
    world.advance(0.2)
    assert world.messages_to(1, CallFunction) == [CallFunction(call_id=7, pickled_call=b"call")]
    world.send_from_worker(1, CallResult(call_id=7, pickled_value=b"value"))
    world.advance(0.2)
    assert world.hooks.results == [(1, 1, CallResult(call_id=7, pickled_value=b"value"))]


def test_the_run_finishes_after_the_last_hook_and_all_exits() -> None:
    world = FakeCluster(has_backend_hooks=True)
    to_training(world)
    for rank in (0, 1):
        world.send_from_worker(rank, WorkerReturned(report_count=0))
    world.advance(2.0)
    assert world.view.is_active
    assert world.hooks.requested[-1] == ("on_shutdown", 1, 2)
    hooks_done(world)
    assert world.messages_to(0, OpenGate)[-1] == OpenGate(phase="leave")
    world.advance(2.0)
    assert world.view.is_active, "they are leaving"
    for rank in (0, 1):
        world.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).outcome == "finished"


def test_a_worker_exit_before_the_last_gate_fails_the_hook() -> None:
    world = FakeCluster(has_backend_hooks=True)
    to_training(world)
    for rank in (0, 1):
        world.send_from_worker(rank, WorkerReturned(report_count=0))
    world.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    world.advance(0.2)
    assert world.hooks.ended_rounds == [1]
    hooks_done(world)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).outcome == "finished", "all functions had returned"


def test_a_hook_that_raises_ends_the_run() -> None:
    world = FakeCluster(has_backend_hooks=True, failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.hooks.error = UserCodeError(
        reason="the backend's on_start raised",
        traceback_text="Traceback\nKeyError: 'x'",
        pickle_key="f/1",
    )
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert (ended.cause, ended.reason) == (FailureCause.PLATFORM, "the backend's on_start raised")
    assert ended.failures == (
        RankFailure(rank=-1, kind="raised", message="Traceback\nKeyError: 'x'", pickle_key="f/1"),
    )


def test_every_round_runs_all_hooks() -> None:
    world = FakeCluster(has_backend_hooks=True, failure_limits=ANY_FAILURES)
    to_training(world)
    world.fail_rank(1)
    world.advance_until(
        lambda: world.view.round and world.view.round.number == 2 and world.is_training
    )
    assert world.hooks.requested[2:] == [("on_shutdown", 1, 2)]
    for rank in (0, 1):
        world.send_from_worker(rank, AtGate(phase="setup"))
    assert world.hooks.requested[-1] == ("on_start", 2, 2)


def test_the_run_ends_after_the_shutdown_hook_of_a_failed_round() -> None:
    world = FakeCluster(has_backend_hooks=True)
    to_training(world)
    world.fail_rank(1)
    world.advance(2.0)
    assert world.view.is_active
    hooks_done(world)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).cause is FailureCause.WORKER


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_stored_as_json_lines() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.report(0, loss=3)
    world.checkpoint(1, "c1", loss=2)
    leader = world.leader.agent_id
    world.finish_rank(1)
    world.finish_rank(0)
    world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    chunks = [world.read_object(key) for (key, _) in world.store.list(f".spotfit/reports/{leader}")]
    lines = [msgspec.json.decode(line) for line in b"".join(chunks).splitlines()]
    assert [(one["round"], one["report_index"], one["checkpoint"]) for one in lines] == [
        (1, 0, None),
        (1, 1, "c1"),
    ]
    assert [one["metrics"]["loss"] for one in lines] == [3, 2]


# --- checkpoints ---------------------------------------------------------------------------------


def test_files_of_a_dropped_checkpoint_are_deleted() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    world.wait_for_round()
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    world.advance_until(lambda: world.last_event(CheckpointDropped))
    world.advance(1.0)
    assert world.last_event(CheckpointDropped).name == "c0"
    left = {key for (key, _) in world.store.list() if "/c0/" in key or key.startswith("c0/")}
    assert left == set()
    assert world.read_object("c1/model") == b"weights"


def test_deletions_are_retried_after_store_errors() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    world.wait_for_round()
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
    world.checkpoint(0, "c0")
    delete, failures = world.store.delete, [1, 2, 3]

    def moody_delete(key: str) -> None:
        if failures:
            failures.pop()
            world.store.should_fail = lambda: True
        delete(key)

    def calm() -> bool:
        world.store.should_fail = lambda: False
        return bool(failures)

    world.store.delete = moody_delete  # type: ignore[method-assign]  # fails three times
    world.checkpoint(1, "c1")
    world.advance_until(lambda: not calm())
    world.advance(2.0)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())


def test_a_reused_name_gets_a_suffix_and_drops_the_earlier_checkpoint() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    saved_by_rank_0(world, "last")
    world.checkpoint(0, "last")
    for n, base in ((1, "last"), (2, "last@1-1")):
        world.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
        world.send_from_worker(
            0, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
        )
        named = world.messages_to(0, CheckpointNamed)[-1]
        assert (named.checkpoint_name, named.parent) == (f"last@1-{n}", base)
        world.advance(1.0)
        assert world.read_object("last/model" if n == 1 else "last@1-1/model") == b"weights"
        saved_by_rank_0(world, named.checkpoint_name, n)
        world.send_from_worker(
            0, SaveCompleted(report_index=n, checkpoint_name=named.checkpoint_name)
        )
        world.advance(1.0)
    assert [one.name for one in world.view.checkpoints] == ["last@1-2"]
    left = {key.partition("/")[0] for (key, _) in world.store.list()}
    assert left == {".spotfit", "last@1-2"}
    world.fail_rank(1)
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
    )
    named = world.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("last@2-0", "last@1-2")


def test_of_checkpoints_in_one_custom_folder_only_the_last_is_retained() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=3))
    world.wait_for_round()
    for n, name in enumerate(("mine", "mine@1-1", "mine@1-2")):
        world.store.put("mine/model", b"x" * (n + 1))
        world.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
        world.send_from_worker(
            0,
            FilesReport(
                report_index=n,
                metrics=msgspec.Raw(b"{}"),
                checkpoint_dir_name="mine",
                managed_upload=False,
            ),
        )
        save_existing_files(
            world.store,
            Manifest(
                name=name,
                round=1,
                report_index=n,
                rank=0,
                ranks=(0,),
                metrics={},
                files=(),
                custom_folder="mine",
            ),
        )
        world.send_from_worker(
            0,
            SaveCompleted(
                report_index=n, checkpoint_name=name, size_bytes=n + 1, custom_folder="mine"
            ),
        )
        world.advance(1.0)
    assert [one.name for one in world.view.checkpoints] == ["mine@1-2"]
    assert world.read_object("mine/model") == b"xxx"
    assert [
        one.name for one in manifests_of_all(world.store, ["mine", "mine@1-1", "mine@1-2"])
    ] == ["mine@1-2"]


def snapshot(world: FakeCluster, n: int) -> tuple[str, str]:
    """All ranks hand a snapshot over as their n-th report, and it is committed: its name, and that
    of the one it may share files with."""
    for rank in (0, 1):
        world.send_from_worker(
            rank, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    named = world.messages_to(0, CheckpointNamed)[-1]
    for rank in (0, 1):
        world.send_from_worker(
            rank,
            SaveCompleted(report_index=n, checkpoint_name=named.checkpoint_name, size_bytes=10),
        )
    world.advance_until(lambda: world.last_event(CheckpointCommitted).name == named.checkpoint_name)
    return named.checkpoint_name, named.parent


def test_a_snapshot_shares_files_with_the_previous_one_unless_it_is_corrupt() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    first, base = snapshot(world, 0)
    assert base == ""
    second, base = snapshot(world, 1)
    assert base == first
    world.fail_rank(1)
    world.wait_for_round()
    world.send_from_worker(0, CheckpointCorrupt(checkpoint_name=second))
    third, base = snapshot(world, 0)
    assert base == ""
    assert snapshot(world, 1)[1] == third


def test_a_new_leader_shares_no_files_of_earlier_terms() -> None:
    world = FakeCluster()
    world.wait_for_round()
    snapshot(world, 0)
    world.send_from_worker(0, CheckpointCorrupt(checkpoint_name=snapshot(world, 1)[0]))
    gone = world.leader
    world.kill(gone)
    world.advance_until(
        lambda: world.last_event(RoundOpened).round.number == 2 and world.is_training
    )
    assert world.last_event(LeaderElected).lost_leader == gone.agent_id
    first, base = snapshot(world, 0)
    assert base == ""
    assert snapshot(world, 1)[1] == first


def half_saved_by_rank_0(world: FakeCluster, n: int) -> str:
    """All report; rank 0 is given a name, and dies while it uploads."""
    world.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(0, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}")))
    name = str(world.messages_to(0, CheckpointNamed)[-1].checkpoint_name)
    world.store.put(f"{name}/half", b"we")
    world.advance(0.5)
    return name


def test_an_incomplete_upload_is_deleted_in_the_next_round() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    saved_by_rank_0(world, "c0")
    world.checkpoint(0, "c0")
    half = half_saved_by_rank_0(world, 1)
    world.advance(5.0)
    assert world.read_object(f"{half}/half"), "its round may still finish it"
    world.node_of_rank(0).worker_pool.end_worker(0, "was killed by SIGKILL")
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    world.advance(1.0)
    assert not any(half in key for (key, _) in world.store.list())
    assert world.read_object("c0/model") == b"weights"


def test_a_new_leader_finishes_deletions() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    world.wait_for_round()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    world.advance_until(lambda: world.last_event(CheckpointDropped))
    world.kill(world.leader)
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.advance_until(lambda: world.is_training, within_s=60)
    world.advance(1.0)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())
    assert world.read_object("c1/model") == b"weights"


def test_a_new_leader_after_training_finishes_deletions() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=1), validation=ValidationSpec())
    world.wait_for_round()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}", validation=ValidationRequest() if n else None)
    world.advance_until(lambda: world.last_event(CheckpointDropped) and world.validating_node)
    validates, leader = world.validating_node, world.leader
    for rank in (1, 0):
        world.finish_rank(rank)
    world.advance_until(lambda: world.last_event(TrainingEnded))
    world.kill(leader)
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.advance_until(lambda: world.leader is validates, within_s=60)
    world.advance_until(lambda: not any(key.startswith("c0/") for (key, _) in world.store.list()))
    assert not any("/c0/" in key for (key, _) in world.store.list())
    assert world.read_object("c1/model") == b"weights"


@pytest.mark.parametrize("dies", [True, False])
def test_a_name_of_an_incomplete_upload_is_not_reused(*, dies: bool) -> None:
    """A late worker may still upload files of that name, or a former leader delete them."""
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="half")
    )
    assert world.messages_to(0, CheckpointNamed)[-1].checkpoint_name == "half"
    if dies:
        world.advance(0.5)
        world.kill(world.leader)
        world.advance_until(
            lambda: world.is_training and world.last_event(RoundOpened).round.number == 2
        )
    else:
        world.fail_rank(1)
        world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="half")
    )
    named = world.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("half@2-0", "")


def test_the_leader_exits_after_all_deletions() -> None:
    world = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    world.wait_for_round()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    leader = world.leader
    world.finish_rank(1)
    world.finish_rank(0)
    world.advance_until(lambda: world.view.fit_end)
    world.advance(3.0)
    assert not leader.has_exited
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.advance_until(lambda: leader.has_exited)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())


def test_the_leader_exits_although_a_shared_parent_is_not_deleted() -> None:
    """A failed training's last upload came in, and its files are listed from then on."""
    world = FakeCluster()
    world.wait_for_round()
    saved_by_rank_0(world, "last")
    world.checkpoint(0, "last")
    world.send_from_worker(1, MetricsReport(report_index=1, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
    )
    named = world.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("last@1-1", "last")
    leader, crew = world.leader, world.node_of_rank(0).worker_pool
    crew.uploading_round = 1
    world.fail_rank(1)
    world.advance(1.0)
    late = Manifest(
        name=named.checkpoint_name,
        round=1,
        report_index=1,
        rank=0,
        ranks=(0,),
        metrics={},
        files=(),
    )
    world.store.put(late.key, encode(late))
    crew.uploading_round = None
    world.advance_until(lambda: world.view.fit_end, within_s=200)
    assert world.last_event(CheckpointDropped).name == "last"
    world.advance_until(lambda: leader.has_exited, within_s=200)


def _no_answer(_key: str) -> None:
    raise TransientStoreError("no answer")


# --- rounds --------------------------------------------------------------------------------------


def dies_while_its_upload_goes_on(world: FakeCluster) -> None:
    """Rank 0 trains for ten seconds, gives its files away, and dies before they are there."""
    world.wait_for_round()
    world.advance(10.0)
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    crew = world.node_of_rank(0).worker_pool
    crew.uploading_round = 1
    crew.end_worker(0, "was killed by SIGKILL")
    world.advance(5.0)


def test_the_end_reports_why_the_last_save_failed() -> None:
    world = FakeCluster()
    world.wait_for_round()
    for rank in (0, 1):
        world.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
        )
    world.send_from_worker(1, SaveFailed(report_index=0, reason="the bucket is gone"))
    for rank in (0, 1):
        world.send_from_worker(rank, WorkerReturned(report_count=1))
        world.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).last_save_error == "rank 1: the bucket is gone"


@pytest.mark.parametrize("failures", [-1, 0])
def test_an_upload_of_an_exited_worker_is_committed_first(failures: int) -> None:
    world = FakeCluster(failure_limits=FailureLimits(worker=failures))
    dies_while_its_upload_goes_on(world)
    assert world.view.round is None, "the next round waits for it"
    assert world.view.is_active, "and so does the end"
    saved_by_rank_0(world, "c1")
    for node in world.nodes.values():
        node.worker_pool.uploading_round = None
    world.advance_until(lambda: world.view.fit_end or world.view.round)
    assert [one.name for one in world.view.checkpoints] == ["c1"]
    if failures:
        assert world.last_event(RoundOpened).round.checkpoint_name == "c1"


def test_a_slow_upload_of_a_closed_round_is_cancelled() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    dies_while_its_upload_goes_on(world)
    world.advance_until(lambda: world.is_training)
    assert world.last_event(RoundOpened).round.checkpoint_name is None
    assert all(node.worker_pool.uploading_round is None for node in world.nodes.values())


def test_uploads_of_a_lost_machine_are_not_waited_for() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    dies_while_its_upload_goes_on(world)
    carrying = next(
        node for node in world.nodes.values() if node.worker_pool.uploading_round is not None
    )
    world.kill(carrying)
    assert world.advance_until(lambda: world.is_training) < 8.0


def test_a_ready_checkpoint_is_committed_before_the_round_closes() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    world.store.should_fail = lambda: True
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1"))
    world.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    world.advance(1.0)
    world.store.should_fail = lambda: False
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    kinds = [type(entry.event) for entry in world.entries]
    assert kinds.index(CheckpointCommitted) < kinds.index(RoundClosed)
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "c1"


def test_a_decision_is_retried_soon_after_a_store_error() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    world.advance(5.0)  # without events the next decision is due in half a minute
    world.store.should_fail = lambda: True
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1"))
    world.advance(1.0)
    world.store.should_fail = lambda: False
    took_s = world.advance_until(lambda: world.last_event(CheckpointCommitted))
    assert took_s < 1.0


def test_an_unresponsive_agent_is_disconnected() -> None:
    world = FakeCluster()
    world.wait_for_round()
    silent = next(node for node in world.nodes.values() if node is not world.leader)
    silent.process.freeze()
    took_s = world.advance_until(lambda: world.last_event(RoundClosed))
    assert TEMPO.heartbeat_timeout_s < took_s < TEMPO.heartbeat_timeout_s + 3
    world.advance_until(lambda: world.last_event(NodeLost))
    assert world.last_event(NodeLost).agent == silent.agent_id


def test_journal_entries_are_sent_to_all_agents() -> None:
    world = FakeCluster()
    world.wait_for_round()
    follower = next(node for node in world.nodes.values() if node is not world.leader)
    world.checkpoint(0, "c1")
    assert follower.ledger.view.latest_checkpoint is not None
