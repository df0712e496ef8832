"""Tests of the leader: callbacks, hooks, checkpoints, and the end of rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent import leader as leader_module
from spotfit.agent.ports import AgentMessageReceived
from spotfit.checkpoint.manifest import Manifest, combine_digests, manifests_of_all
from spotfit.checkpoint.writer import save_existing_files
from spotfit.control.background_calls import BackgroundResult
from spotfit.core.errors import TransientStoreError
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
    TrainingFunctionStarted,
    ValidationRequest,
)
from spotfit.model.leader_state import UserCodeError, ValidationReported
from spotfit.model.spec import FailureLimits, RetentionConfig, ValidationSpec
from spotfit.protocol.agent_leader import Join
from spotfit.protocol.agent_sidecar import CallWorkers
from spotfit.protocol.worker_agent import (
    AtGate,
    CallFunction,
    CallResult,
    CheckpointCorrupt,
    CheckpointNamed,
    FilesReport,
    FunctionStarted,
    MetricsReport,
    OpenGate,
    RankZeroBroadcast,
    RequestFinalSave,
    SaveCompleted,
    SaveFailed,
    SuggestSave,
    WorkerReturned,
)
from spotfit.testing.builders import RUN_ID
from tests.unit.agent.simulated_cluster import TIMING, FakeCluster

ANY_FAILURES = FailureLimits(worker=-1)
NO_METRICS = msgspec.Raw(b"{}")


def write_checkpoint_files(cluster: FakeCluster, name: str, report: int = 0) -> None:
    """Write the files of a checkpoint and their manifest, as rank 0 does."""
    cluster.store.put(f"{name}/model", b"weights")
    part = Manifest(
        name=name, round=1, report_index=report, rank=0, ranks=(0,), metrics={"loss": 1.0}, files=()
    )
    cluster.put_manifest(part)


# --- reports -------------------------------------------------------------------------------------


def test_callbacks_receive_all_reports_in_order() -> None:
    cluster = FakeCluster(has_callbacks=True)
    cluster.wait_for_round()
    cluster.report(0, loss=3)
    cluster.checkpoint(1, "c1", loss=2)
    cluster.report(2, loss=1)
    assert cluster.callback_runner.reports == [
        ([{"rank": 0, "loss": 3}, {"rank": 1, "loss": 3}], None),
        ([{"rank": 0, "loss": 2}, {"rank": 1, "loss": 2}], "c1"),
        ([{"rank": 0, "loss": 1}, {"rank": 1, "loss": 1}], None),
    ]


def lose_leader(cluster: FakeCluster) -> None:
    """Kill the leader and wait for the next round."""
    before = cluster.last_event(RoundOpened).round.number
    cluster.kill(cluster.leader)
    cluster.advance_until(
        lambda: cluster.last_event(RoundOpened).round.number > before and cluster.is_training,
        within_s=60,
    )


def losses_of(cluster: FakeCluster) -> list[tuple[list[int], str | None]]:
    reports = cluster.callback_runner.reports
    return [([one["loss"] for one in metrics], checkpoint) for metrics, checkpoint in reports]


def test_callbacks_that_are_lost_with_the_leader_are_called_by_the_next_one() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.callback_runner.is_stuck = True
    cluster.report(0, loss=3)
    cluster.checkpoint(1, "c1", loss=2)
    cluster.advance(1.5)
    cluster.callback_runner.reports.clear()  # these calls are lost
    cluster.callback_runner.is_stuck = False
    lose_leader(cluster)
    cluster.report(0, loss=1)
    assert losses_of(cluster) == [([3, 3], None), ([2, 2], "c1"), ([1, 1], None)]


def test_callbacks_that_have_returned_are_not_called_by_the_next_leader() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.report(0, loss=3)
    cluster.checkpoint(1, "c1", loss=2)
    cluster.advance(2.5)
    lose_leader(cluster)
    cluster.report(0, loss=1)
    assert losses_of(cluster) == [([3, 3], None), ([2, 2], "c1"), ([1, 1], None)]


def test_the_run_ends_after_lost_callbacks_were_called_again() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=FailureLimits(worker=0))
    cluster.wait_for_round()
    cluster.callback_runner.is_stuck = True
    cluster.report(0, loss=3)
    cluster.advance(1.5)
    cluster.callback_runner.reports.clear()
    cluster.callback_runner.is_stuck = False
    lose_leader(cluster)
    cluster.fail_rank(0)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert losses_of(cluster) == [([3, 3], None)]


def test_callbacks_receive_a_checkpoint_after_its_commit() -> None:
    cluster = FakeCluster(has_callbacks=True)
    cluster.wait_for_round()
    cluster.store.should_fail = lambda: True
    cluster.checkpoint(0, "c1")
    assert cluster.callback_runner.reports == []
    cluster.store.should_fail = lambda: False
    cluster.advance_until(lambda: cluster.callback_runner.reports)
    assert cluster.callback_runner.reports[0][1] == "c1"


def test_callbacks_receive_checkpoints_committed_at_the_end_of_a_round() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b'{"rank":1}')))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b'{"rank":0}'), checkpoint_dir_name="c1")
    )
    cluster.store.should_fail = lambda: True
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=1))
    cluster.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    cluster.advance(1.0)
    cluster.store.should_fail = lambda: False
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert cluster.last_event(CheckpointCommitted).name == "c1"
    assert cluster.callback_runner.reports == [([{"rank": 0}, {"rank": 1}], "c1")]


def test_reports_that_waited_for_an_upload_are_delivered_if_they_count() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.report(0, first_rank=1)
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c0")
    )
    cluster.checkpoint(1, "c1")
    cluster.report(2)
    assert cluster.callback_runner.reports == [], "c0 is not complete"
    for n, name in enumerate(("c0", "c1")):
        write_checkpoint_files(cluster, name, report=n)
    cluster.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    cluster.advance_until(lambda: cluster.last_event(RoundOpened).round.number == 2)
    assert cluster.last_event(RoundOpened).round.checkpoint_name == "c1"
    assert [checkpoint for _, checkpoint in cluster.callback_runner.reports] == ["c0", "c1"]
    cluster.report(0)
    assert len(cluster.callback_runner.reports) == 3, "the last report was made again"


def test_reports_that_wait_for_an_upload_are_stored_at_a_change_of_the_leader() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    old = cluster.leader.agent_id
    cluster.report(0)
    for rank in (0, 1):
        snapshot = FilesReport(report_index=1, metrics=NO_METRICS, incremental=True, step=5)
        cluster.send_from_worker(rank, snapshot)
    other = next(node for node in cluster.nodes.values() if node.agent_id != old)
    cluster.append(
        LeaderElected(
            leader=other.agent_id,
            epoch=cluster.view.epoch + 1,
            coordinator_address=other.agent_id,
        )
    )
    cluster.advance(0.5)
    assert cluster.last_event(LeaderElected).leader == other.agent_id
    # The first chunk is less than a second old: the second one must not wait for its successor.
    lines = [cluster.read_object(one.key) for one in cluster.store.list(f".spotfit/reports/{old}")]
    stored = [msgspec.json.decode(line) for line in lines]
    assert [(one["report_index"], one["checkpoint"]) for one in stored] == [(0, None), (1, None)]


def test_two_changes_of_the_leader_in_one_read_deliver_reports_once() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    old, epoch = cluster.leader.agent_id, cluster.view.epoch
    for rank in (0, 1):
        snapshot = FilesReport(report_index=0, metrics=NO_METRICS, incremental=True, step=5)
        cluster.send_from_worker(rank, snapshot)
    other = next(node for node in cluster.nodes.values() if node.agent_id != old)
    for n in (1, 2):
        cluster.append(
            LeaderElected(
                leader=other.agent_id, epoch=epoch + n, coordinator_address=other.agent_id
            )
        )
    cluster.advance(0.5)
    lines = [cluster.read_object(one.key) for one in cluster.store.list(f".spotfit/reports/{old}")]
    assert [msgspec.json.decode(one)["report_index"] for one in b"".join(lines).splitlines()] == [0]


def test_a_checkpoint_is_committed_after_the_reports_before_it_are_stored() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.report(0)
    cluster.settle()
    cluster.report(1)  # the chunk with it is due in a second
    cluster.checkpoint(2, "c2")
    took_s = cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    stored = b"".join(
        cluster.read_object(one.key) for one in cluster.store.list(".spotfit/reports")
    ).splitlines()
    assert [msgspec.json.decode(line)["report_index"] for line in stored][:2] == [0, 1]
    assert took_s < 0.5


def stored_reports(cluster: FakeCluster) -> list[tuple[int, str | None]]:
    chunks = [cluster.read_object(one.key) for one in cluster.store.list(".spotfit/reports")]
    lines = [msgspec.json.decode(line) for chunk in chunks for line in chunk.splitlines()]
    return [(line["report_index"], line["checkpoint"]) for line in lines]


def test_the_report_of_a_checkpoint_is_stored_before_its_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    hold_report_writes(cluster, monkeypatch)
    cluster.checkpoint(0, "c0")
    cluster.advance(5.0)
    assert cluster.events_of(CheckpointCommitted) == []
    monkeypatch.undo()
    cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    assert stored_reports(cluster) == [(0, "c0")], "its leader may be lost now"


def test_reports_are_stored_while_the_checkpoint_after_them_is_uploaded() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.report(0)
    cluster.settle()
    cluster.report(1)  # the chunk with it is due in a second
    for rank in (0, 1):
        snapshot = FilesReport(report_index=2, metrics=NO_METRICS, incremental=True, step=5)
        cluster.send_from_worker(rank, snapshot)
    cluster.advance(0.2)
    assert stored_reports(cluster) == [(0, None), (1, None)]


def test_a_new_leader_stores_the_report_of_a_checkpoint_that_it_commits() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=NO_METRICS))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=NO_METRICS, checkpoint_dir_name="c0")
    )
    write_checkpoint_files(cluster, "c0")
    cluster.kill(cluster.leader)
    cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted), within_s=60)
    cluster.advance(1.5)
    assert stored_reports(cluster) == [(0, "c0")]


def test_a_new_leader_takes_over_the_reports_of_all_checkpoints_that_it_commits() -> None:
    """Two were complete before the first was committed. Their callbacks were not called."""
    cluster = FakeCluster(failure_limits=ANY_FAILURES, has_callbacks=True)
    cluster.wait_for_round()
    for number in range(2):
        write_checkpoint_files(cluster, f"c{number}", number)
    cluster.kill(cluster.leader)
    cluster.advance_until(lambda: len(cluster.events_of(CheckpointCommitted)) == 2, within_s=60)
    cluster.advance(3.0)
    assert stored_reports(cluster) == [(0, "c0"), (1, "c1")]
    assert [name for _, name in cluster.callback_runner.reports] == ["c0", "c1"]


def hold_report_writes(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket does not answer the leader's writes of reports."""
    calls = cluster.leader.node_services.stallable_calls
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


def test_a_save_is_suggested_before_a_group_grows() -> None:
    timing = replace(TIMING, round_fill_timeout_s=1.0)
    world = FakeCluster(min_workers=1, max_workers=2, resize_interval_s=20.0, timing=timing)
    world.boots_granted = False
    world.advance_until(lambda: world.cloud.groups)
    token = next(iter(world.cloud.groups))
    world.boot(token, 0)
    assert world.wait_for_round() == 1
    world.send_from_worker(0, RankZeroBroadcast(kind="Checkpointer", seq=0))
    world.boot(token, 1)
    world.advance(10.0)
    assert world.messages_to(0, SuggestSave) == [], "not before the interval"
    world.advance_until(lambda: world.messages_to(0, SuggestSave))
    assert world.messages_to(0, SuggestSave) == [
        SuggestSave(reason="machines for more workers are ready")
    ]
    world.checkpoint(0, "c1")
    assert world.wait_for_round() == 2
    assert world.last_event(RoundOpened).round.world_size == 2


def test_a_run_without_a_checkpointer_is_cancelled_at_once() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.append(CancelRequested(reason="enough", save=True))
    world.advance(1.0)
    assert world.last_event(FitEnded).outcome == "cancelled"


def test_callbacks_receive_failures_by_rank() -> None:
    cluster = FakeCluster(has_callbacks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.fail_rank(1, "KeyError: 'x'")
    cluster.advance_until(lambda: cluster.callback_runner.failures)
    assert cluster.callback_runner.failures == [{1: "Traceback\nKeyError: 'x'"}]


def test_a_callback_that_raises_ends_the_run() -> None:
    cluster = FakeCluster(has_callbacks=True)
    cluster.wait_for_round()
    cluster.callback_runner.error_text = "Traceback\nKeyError: 'x'"
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.PLATFORM)
    assert ended.failures[0].message == "Traceback\nKeyError: 'x'"


def test_the_run_ends_after_callbacks_processed_all_reports() -> None:
    cluster = FakeCluster(has_callbacks=True)
    cluster.wait_for_round()
    cluster.callback_runner.is_idle = False
    cluster.finish_rank(1)
    cluster.finish_rank(0)
    cluster.advance(2.0)
    assert cluster.view.is_active
    cluster.callback_runner.is_idle = True
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).outcome == "finished"


# --- backend hooks -------------------------------------------------------------------------------


def finish_hooks(cluster: FakeCluster) -> None:
    cluster.hooks.unfinished = []
    cluster.advance(0.2)


def advance_to_training(cluster: FakeCluster) -> None:
    """Pass all workers through the hooks that precede the training function."""
    cluster.wait_for_round()
    for phase in ("setup", "train"):
        for rank in (0, 1):
            cluster.send_from_worker(rank, AtGate(phase=phase))
        finish_hooks(cluster)


def test_hooks_and_workers_wait_for_each_other_at_the_gates() -> None:
    cluster = FakeCluster(has_backend_hooks=True)
    cluster.wait_for_round()
    cluster.send_from_worker(0, AtGate(phase="setup"))
    assert cluster.hooks.requested == []
    cluster.send_from_worker(1, AtGate(phase="setup"))
    assert cluster.hooks.requested == [("on_start", 1, 2)]
    assert cluster.messages_to(0, OpenGate) == []
    finish_hooks(cluster)
    assert (
        cluster.messages_to(0, OpenGate)
        == cluster.messages_to(1, OpenGate)
        == [OpenGate(phase="setup")]
    )


def test_the_start_of_the_training_function_is_recorded_at_once() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.advance(10.0)
    cluster.send_from_worker(0, FunctionStarted())
    cluster.advance(1.0)
    assert cluster.view.round_startup_s is None
    cluster.send_from_worker(1, FunctionStarted())
    cluster.advance(0.5)
    assert cluster.last_event(TrainingFunctionStarted).round_number == 1
    assert cluster.view.round_startup_s == pytest.approx(11.0, abs=0.5)


def test_worker_calls_of_hooks_pass_through_the_leader() -> None:
    cluster = FakeCluster(has_backend_hooks=True)
    cluster.wait_for_round()
    cluster.hooks.calls = [CallWorkers(round=1, call_id=7, ranks=(1,), pickled_call=b"call")]
    cluster.advance(0.2)
    assert cluster.messages_to(1, CallFunction) == [CallFunction(call_id=7, pickled_call=b"call")]
    cluster.send_from_worker(1, CallResult(call_id=7, pickled_value=b"value"))
    cluster.advance(0.2)
    assert cluster.hooks.results == [(1, 1, CallResult(call_id=7, pickled_value=b"value"))]


def test_the_run_finishes_after_the_last_hook_and_all_exits() -> None:
    cluster = FakeCluster(has_backend_hooks=True)
    advance_to_training(cluster)
    for rank in (0, 1):
        cluster.send_from_worker(rank, WorkerReturned(report_count=0))
    cluster.advance(2.0)
    assert cluster.view.is_active
    assert cluster.hooks.requested[-1] == ("on_shutdown", 1, 2)
    finish_hooks(cluster)
    assert cluster.messages_to(0, OpenGate)[-1] == OpenGate(phase="leave")
    cluster.advance(2.0)
    assert cluster.view.is_active, "workers have not exited"
    for rank in (0, 1):
        cluster.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).outcome == "finished"


def test_a_worker_exit_before_the_last_gate_fails_the_hook() -> None:
    cluster = FakeCluster(has_backend_hooks=True)
    advance_to_training(cluster)
    for rank in (0, 1):
        cluster.send_from_worker(rank, WorkerReturned(report_count=0))
    cluster.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    cluster.advance(0.2)
    assert cluster.hooks.ended_rounds == [1]
    finish_hooks(cluster)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).outcome == "finished", "all functions returned before"


def test_a_hook_that_raises_ends_the_run() -> None:
    cluster = FakeCluster(has_backend_hooks=True, failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.hooks.error = UserCodeError(
        reason="the backend's on_start raised",
        traceback_text="Traceback\nKeyError: 'x'",
        pickle_key="f/1",
    )
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert (ended.cause, ended.reason) == (FailureCause.PLATFORM, "the backend's on_start raised")
    assert ended.failures == (
        RankFailure(rank=-1, kind="raised", message="Traceback\nKeyError: 'x'", pickle_key="f/1"),
    )


def test_every_round_runs_all_hooks() -> None:
    cluster = FakeCluster(has_backend_hooks=True, failure_limits=ANY_FAILURES)
    advance_to_training(cluster)
    cluster.fail_rank(1)
    cluster.advance_until(
        lambda: cluster.view.round and cluster.view.round.number == 2 and cluster.is_training
    )
    assert cluster.hooks.requested[2:] == [("on_shutdown", 1, 2)]
    for rank in (0, 1):
        cluster.send_from_worker(rank, AtGate(phase="setup"))
    assert cluster.hooks.requested[-1] == ("on_start", 2, 2)


def test_the_run_ends_after_the_shutdown_hook_of_a_failed_round() -> None:
    cluster = FakeCluster(has_backend_hooks=True)
    advance_to_training(cluster)
    cluster.fail_rank(1)
    cluster.advance(2.0)
    assert cluster.view.is_active
    finish_hooks(cluster)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).cause is FailureCause.WORKER


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_stored_as_json_lines() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.report(0, loss=3)
    cluster.checkpoint(1, "c1", loss=2)
    leader = cluster.leader.agent_id
    cluster.finish_rank(1)
    cluster.finish_rank(0)
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    chunks = [
        cluster.read_object(key) for (key, *_) in cluster.store.list(f".spotfit/reports/{leader}")
    ]
    lines = [msgspec.json.decode(line) for line in b"".join(chunks).splitlines()]
    assert [(one["round"], one["report_index"], one["checkpoint"]) for one in lines] == [
        (1, 0, None),
        (1, 1, "c1"),
    ]
    assert [one["metrics"]["loss"] for one in lines] == [3, 2]


# --- checkpoints ---------------------------------------------------------------------------------


def test_files_of_a_dropped_checkpoint_are_deleted() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}")
    cluster.advance_until(lambda: cluster.last_event(CheckpointDropped))
    cluster.advance(1.0)
    assert cluster.last_event(CheckpointDropped).name == "c0"
    left = {key for (key, *_) in cluster.store.list() if "/c0/" in key or key.startswith("c0/")}
    assert left == set()
    assert cluster.read_object("c1/model") == b"weights"


def test_deletions_are_retried_after_store_errors() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
    cluster.checkpoint(0, "c0")
    delete, failures = cluster.store.delete, [1, 2, 3]

    def failing_delete(key: str) -> None:
        if failures:
            failures.pop()
            cluster.store.should_fail = lambda: True
        delete(key)

    def restore_store() -> bool:
        cluster.store.should_fail = lambda: False
        return bool(failures)

    cluster.store.delete = failing_delete  # type: ignore[method-assign]  # fails three times
    cluster.checkpoint(1, "c1")
    cluster.advance_until(lambda: not restore_store())
    cluster.advance(2.0)
    assert not any(key.startswith("c0/") for (key, *_) in cluster.store.list())


def test_a_reused_name_gets_a_suffix_and_drops_the_earlier_checkpoint() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    write_checkpoint_files(cluster, "last")
    cluster.checkpoint(0, "last")
    for n, base in ((1, "last"), (2, "last@1-1")):
        cluster.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
        cluster.send_from_worker(
            0, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
        )
        named = cluster.messages_to(0, CheckpointNamed)[-1]
        assert (named.checkpoint_name, named.parent) == (f"last@1-{n}", base)
        cluster.advance(1.0)
        assert cluster.read_object("last/model" if n == 1 else "last@1-1/model") == b"weights"
        write_checkpoint_files(cluster, named.checkpoint_name, n)
        cluster.send_from_worker(
            0, SaveCompleted(report_index=n, checkpoint_name=named.checkpoint_name)
        )
        cluster.advance(1.0)
    assert [one.name for one in cluster.view.checkpoints] == ["last@1-2"]
    left = {key.partition("/")[0] for (key, *_) in cluster.store.list()}
    assert left == {".spotfit", "last@1-2"}
    cluster.fail_rank(1)
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
    )
    named = cluster.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("last@2-0", "last@1-2")


def test_of_checkpoints_in_one_custom_folder_only_the_last_is_retained() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=3))
    cluster.wait_for_round()
    for n, name in enumerate(("custom", "custom@1-1", "custom@1-2")):
        cluster.store.put("custom/model", b"x" * (n + 1))
        cluster.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
        cluster.send_from_worker(
            0,
            FilesReport(
                report_index=n,
                metrics=msgspec.Raw(b"{}"),
                checkpoint_dir_name="custom",
                managed_upload=False,
            ),
        )
        save_existing_files(
            cluster.store,
            Manifest(
                name=name,
                round=1,
                report_index=n,
                rank=0,
                ranks=(0,),
                metrics={},
                files=(),
                custom_folder="custom",
            ),
        )
        cluster.send_from_worker(
            0,
            SaveCompleted(
                report_index=n, checkpoint_name=name, size_bytes=n + 1, custom_folder="custom"
            ),
        )
        cluster.advance(1.0)
    assert [one.name for one in cluster.view.checkpoints] == ["custom@1-2"]
    assert cluster.read_object("custom/model") == b"xxx"
    assert [
        one.name for one in manifests_of_all(cluster.store, ["custom", "custom@1-1", "custom@1-2"])
    ] == ["custom@1-2"]


def commit_snapshot(cluster: FakeCluster, n: int) -> tuple[str, str]:
    """Commit a snapshot of all ranks as their n-th report; return its name and the name of
    the snapshot whose files it may share."""
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    named = cluster.messages_to(0, CheckpointNamed)[-1]
    for rank in (0, 1):
        cluster.send_from_worker(
            rank,
            SaveCompleted(report_index=n, checkpoint_name=named.checkpoint_name, size_bytes=10),
        )
    cluster.advance_until(
        lambda: cluster.last_event(CheckpointCommitted).name == named.checkpoint_name
    )
    return named.checkpoint_name, named.parent


def test_a_snapshot_shares_files_with_the_previous_one_unless_it_is_corrupt() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    first, base = commit_snapshot(cluster, 0)
    assert base == ""
    second, base = commit_snapshot(cluster, 1)
    assert base == first
    cluster.fail_rank(1)
    cluster.wait_for_round()
    cluster.send_from_worker(0, CheckpointCorrupt(checkpoint_name=second))
    third, base = commit_snapshot(cluster, 0)
    assert base == ""
    assert commit_snapshot(cluster, 1)[1] == third


def test_a_new_leader_shares_no_files_of_earlier_terms() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    commit_snapshot(cluster, 0)
    cluster.send_from_worker(0, CheckpointCorrupt(checkpoint_name=commit_snapshot(cluster, 1)[0]))
    lost_leader = cluster.leader
    cluster.kill(lost_leader)
    cluster.advance_until(
        lambda: cluster.last_event(RoundOpened).round.number == 2 and cluster.is_training
    )
    assert cluster.last_event(LeaderElected).lost_leader == lost_leader.agent_id
    first, base = commit_snapshot(cluster, 0)
    assert base == ""
    assert commit_snapshot(cluster, 1)[1] == first


def start_upload(cluster: FakeCluster, n: int) -> str:
    """Report on all ranks and write one file of rank 0; return the checkpoint name."""
    cluster.send_from_worker(1, MetricsReport(report_index=n, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(0, FilesReport(report_index=n, metrics=msgspec.Raw(b"{}")))
    name = str(cluster.messages_to(0, CheckpointNamed)[-1].checkpoint_name)
    cluster.store.put(f"{name}/half", b"we")
    cluster.advance(0.5)
    return name


def test_an_incomplete_upload_is_deleted_in_the_next_round() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    write_checkpoint_files(cluster, "c0")
    cluster.checkpoint(0, "c0")
    partial_checkpoint = start_upload(cluster, 1)
    cluster.advance(5.0)
    assert cluster.read_object(f"{partial_checkpoint}/half"), (
        "the upload may still finish in its round"
    )
    cluster.node_of_rank(0).worker_pool.end_worker(0, "was killed by SIGKILL")
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    cluster.advance(1.0)
    assert not any(partial_checkpoint in key for (key, *_) in cluster.store.list())
    assert cluster.read_object("c0/model") == b"weights"


def test_a_new_leader_finishes_deletions() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    delete = cluster.store.delete
    cluster.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}")
    cluster.advance_until(lambda: cluster.last_event(CheckpointDropped))
    cluster.kill(cluster.leader)
    cluster.store.delete = delete  # type: ignore[method-assign]  # the store recovers
    cluster.advance_until(lambda: cluster.is_training, within_s=60)
    cluster.advance(1.0)
    assert not any(key.startswith("c0/") for (key, *_) in cluster.store.list())
    assert cluster.read_object("c1/model") == b"weights"


def test_machines_are_released_after_the_deletions_at_the_end() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    delete = cluster.store.delete
    cluster.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}")
    for rank in (0, 1):
        cluster.finish_rank(rank)
    cluster.advance_until(lambda: cluster.view.fit_end)
    cluster.advance(5.0)
    assert not all(group.is_closed for group in cluster.view.groups.values())
    cluster.store.delete = delete  # type: ignore[method-assign]  # the store recovers
    cluster.advance_until(lambda: all(group.is_closed for group in cluster.view.groups.values()))
    assert not any(key.startswith("c0/") for (key, *_) in cluster.store.list())


def test_deletions_delay_the_release_of_machines_by_a_minute_at_most() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    cluster.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}")
    for rank in (0, 1):
        cluster.finish_rank(rank)
    cluster.advance_until(lambda: cluster.view.fit_end)
    cluster.advance_until(
        lambda: all(node.has_exited for node in cluster.nodes.values()), within_s=65.0
    )


def test_a_new_leader_after_training_finishes_deletions() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1), validation=ValidationSpec())
    cluster.wait_for_round()
    delete = cluster.store.delete
    cluster.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}", validation=ValidationRequest() if n else None)
    cluster.advance_until(lambda: cluster.last_event(CheckpointDropped) and cluster.validating_node)
    validating_node, leader = cluster.validating_node, cluster.leader
    for rank in (1, 0):
        cluster.finish_rank(rank)
    cluster.advance_until(lambda: cluster.last_event(TrainingEnded))
    cluster.kill(leader)
    cluster.store.delete = delete  # type: ignore[method-assign]  # the store recovers
    cluster.advance_until(lambda: cluster.leader is validating_node, within_s=60)
    cluster.advance_until(
        lambda: not any(key.startswith("c0/") for (key, *_) in cluster.store.list())
    )
    assert not any("/c0/" in key for (key, *_) in cluster.store.list())
    assert cluster.read_object("c1/model") == b"weights"


@pytest.mark.parametrize("dies", [True, False])
def test_a_name_of_an_incomplete_upload_is_not_reused(*, dies: bool) -> None:
    """A late worker may still upload files of that name, or a former leader delete them."""
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="half")
    )
    assert cluster.messages_to(0, CheckpointNamed)[-1].checkpoint_name == "half"
    if dies:
        cluster.advance(0.5)
        cluster.kill(cluster.leader)
        cluster.advance_until(
            lambda: cluster.is_training and cluster.last_event(RoundOpened).round.number == 2
        )
    else:
        cluster.fail_rank(1)
        cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="half")
    )
    named = cluster.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("half@2-0", "")


def test_the_leader_exits_after_all_deletions() -> None:
    cluster = FakeCluster(retention=RetentionConfig(num_to_keep=1))
    cluster.wait_for_round()
    delete = cluster.store.delete
    cluster.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        write_checkpoint_files(cluster, f"c{n}", n)
        cluster.checkpoint(n, f"c{n}")
    leader = cluster.leader
    cluster.finish_rank(1)
    cluster.finish_rank(0)
    cluster.advance_until(lambda: cluster.view.fit_end)
    cluster.advance(3.0)
    assert not leader.has_exited
    cluster.store.delete = delete  # type: ignore[method-assign]  # the store recovers
    cluster.advance_until(lambda: leader.has_exited)
    assert not any(key.startswith("c0/") for (key, *_) in cluster.store.list())


def test_the_leader_exits_although_a_shared_parent_is_not_deleted() -> None:
    """The last upload of a failed training completed, so its files are listed."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    write_checkpoint_files(cluster, "last")
    cluster.checkpoint(0, "last")
    cluster.send_from_worker(1, MetricsReport(report_index=1, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="last")
    )
    named = cluster.messages_to(0, CheckpointNamed)[-1]
    assert (named.checkpoint_name, named.parent) == ("last@1-1", "last")
    leader, worker_pool = cluster.leader, cluster.node_of_rank(0).worker_pool
    worker_pool.uploading_round = 1
    cluster.fail_rank(1)
    cluster.advance(1.0)
    late = Manifest(
        name=named.checkpoint_name,
        round=1,
        report_index=1,
        rank=0,
        ranks=(0,),
        metrics={},
        files=(),
    )
    cluster.put_manifest(late)
    worker_pool.uploading_round = None
    cluster.advance_until(lambda: cluster.view.fit_end, within_s=200)
    assert cluster.last_event(CheckpointDropped).name == "last"
    cluster.advance_until(lambda: leader.has_exited, within_s=200)


def _no_answer(_key: str) -> None:
    raise TransientStoreError("no answer")


# --- rounds --------------------------------------------------------------------------------------


def end_rank_0_during_its_upload(cluster: FakeCluster) -> None:
    """Rank 0 trains for ten seconds, delegates an upload and is killed before it completes."""
    cluster.wait_for_round()
    cluster.advance(10.0)
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    worker_pool = cluster.node_of_rank(0).worker_pool
    worker_pool.uploading_round = 1
    worker_pool.end_worker(0, "was killed by SIGKILL")
    cluster.advance(5.0)


def test_the_end_reports_why_the_last_save_failed() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
        )
    cluster.send_from_worker(1, SaveFailed(report_index=0, reason="the bucket is unavailable"))
    for rank in (0, 1):
        cluster.send_from_worker(rank, WorkerReturned(report_count=1))
        cluster.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).last_save_error == "rank 1: the bucket is unavailable"


@pytest.mark.parametrize("failures", [-1, 0])
def test_an_upload_of_an_exited_worker_is_committed_first(failures: int) -> None:
    cluster = FakeCluster(failure_limits=FailureLimits(worker=failures))
    end_rank_0_during_its_upload(cluster)
    assert cluster.view.round is None, "the next round waits for it"
    assert cluster.view.is_active, "the end of the run waits too"
    write_checkpoint_files(cluster, "c1")
    for node in cluster.nodes.values():
        node.worker_pool.uploading_round = None
    cluster.advance_until(lambda: cluster.view.fit_end or cluster.view.round)
    assert [one.name for one in cluster.view.checkpoints] == ["c1"]
    if failures:
        assert cluster.last_event(RoundOpened).round.checkpoint_name == "c1"


def test_a_slow_upload_of_a_closed_round_is_cancelled() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    end_rank_0_during_its_upload(cluster)
    cluster.advance_until(lambda: cluster.is_training)
    assert cluster.last_event(RoundOpened).round.checkpoint_name is None
    assert all(node.worker_pool.uploading_round is None for node in cluster.nodes.values())


def test_uploads_of_a_lost_machine_are_not_waited_for() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    end_rank_0_during_its_upload(cluster)
    uploading_node = next(
        node for node in cluster.nodes.values() if node.worker_pool.uploading_round is not None
    )
    cluster.kill(uploading_node)
    assert cluster.advance_until(lambda: cluster.is_training) < 8.0


def test_a_ready_checkpoint_is_committed_before_the_round_closes() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    cluster.store.should_fail = lambda: True
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1"))
    cluster.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    cluster.advance(1.0)
    cluster.store.should_fail = lambda: False
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    kinds = [type(entry.event) for entry in cluster.entries]
    assert kinds.index(CheckpointCommitted) < kinds.index(RoundClosed)
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "c1"


def test_a_decision_is_retried_soon_after_a_store_error() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    cluster.advance(5.0)  # without events the next decision is due in half a minute
    cluster.store.should_fail = lambda: True
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1"))
    cluster.advance(1.0)
    cluster.store.should_fail = lambda: False
    duration_s = cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    assert duration_s < 1.0


def test_an_unresponsive_agent_is_disconnected() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    silent = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    silent.process.freeze()
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert TIMING.heartbeat_timeout_s < duration_s < TIMING.heartbeat_timeout_s + 3
    cluster.advance_until(lambda: cluster.last_event(NodeLost))
    assert cluster.last_event(NodeLost).agent == silent.agent_id


def test_journal_entries_are_sent_to_all_agents() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    follower = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    cluster.checkpoint(0, "c1")
    assert follower.ledger.view.latest_checkpoint is not None


def test_an_entry_that_is_too_large_for_a_frame_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    monkeypatch.setattr(leader_module, "_MAX_ENTRY_COPY_BYTES", 10)
    follower = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    cluster.checkpoint(0, "c1")
    assert cluster.last_event(CheckpointCommitted) is not None
    assert follower.ledger.view.latest_checkpoint is None, "it reads the journal later"
    assert not cluster.leader.has_exited


def test_a_result_of_a_validation_that_the_agent_does_not_run_is_ignored() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.node_of_rank(1).net.send_to_leader(
        ValidationReported(attempt=10**9, status="validated", metrics={"acc": 1.0})
    )
    cluster.advance(1.0)
    leader = cluster.leader.agent._leader
    assert leader is not None
    assert leader._observations.state.validation_reported is None


@pytest.mark.parametrize(
    "member",
    [
        {"slots": -1},
        {"node": -1},
        {"coordinator_address": "10.0.0.1:port"},
        {"peer_store_address": "no port"},
    ],
)
def test_a_join_with_an_impossible_member_is_rejected(
    member: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    other = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    leader = cluster.leader.agent._leader
    assert leader is not None
    joined = Join(run_id=RUN_ID, member=replace(other.member, **member), next_slot=0)
    leader.on_agent_event(AgentMessageReceived(other.agent_id, joined), 100.0)
    assert "join.rejected" in caplog.messages
    assert leader._roster.members[other.agent_id].member == other.member


def test_the_entry_of_a_checkpoint_has_the_digest_of_its_manifests() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=NO_METRICS, checkpoint_dir_name="c1")
    )
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=NO_METRICS))
    saved = SaveCompleted(report_index=0, checkpoint_name="c1", manifest_digest="0" * 64)
    cluster.send_from_worker(0, saved)
    cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    digest = cluster.last_event(CheckpointCommitted).manifests_digest
    assert digest == combine_digests({0: "0" * 64})
