"""A handle observes, cancels and supervises a run from any process."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from msgspec.structs import replace

from spotfit.client import run_handle
from spotfit.client.fit import start_run
from spotfit.client.keyring import RunKeyring
from spotfit.client.run_handle import attach, supervise_run
from spotfit.core.codec import encode
from spotfit.core.errors import (
    ConfigError,
    IntegrityError,
    MissingExtraError,
    ProvisionError,
    RunCancelledError,
    RunNotFoundError,
    WorkerGroupError,
)
from spotfit.core.ids import Token
from spotfit.host import system
from spotfit.ledger import keys
from spotfit.model.events import (
    CancelRequested,
    FailureCause,
    FeedersStopped,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupsReleased,
    LeaderElected,
    RankFailure,
    RoundOpened,
)
from spotfit.provision.api import Traits
from spotfit.testing.builders import (
    a_committed_checkpoint,
    a_member,
    a_request,
    a_round,
    an_agent_id,
)
from tests.unit.client.harness import ClientHarness
from tests.unit.control.fake_provisioner import FakeProvisioner

FINISHED = FitEnded(outcome="finished", metrics={"loss": 0.5})


def test_status_follows_the_state_of_the_run(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    assert (handle.status().state, handle.status().machines) == ("waiting", 2)
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        ),
        RoundOpened(round=a_round()),
    )
    status = handle.status()
    assert (status.name, status.state, status.round, status.workers) == ("digits", "running", 1, 2)
    harness.append_as_agent(
        FitEnded(outcome="failed", reason="a callback raised", cause=FailureCause.PLATFORM)
    )
    assert (handle.status().state, handle.status().reason) == ("failed", "a callback raised")


def test_the_repr_of_a_handle_has_name_state_and_url(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    assert repr(handle) == f"RunHandle(name='digits', state='waiting', url={harness.url!r})"
    harness.end_run(FitEnded(outcome="failed"))
    handle.status()
    assert repr(handle) == f"RunHandle(name='digits', state='failed', url={harness.url!r})"


def test_a_handle_completes_public_names(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    offered = {name for name in dir(handle) if not name.startswith("_")}
    assert offered == {
        *("cancel", "logs", "machine_logs", "metrics", "result", "status", "url", "watch")
    }
    assert all(hasattr(handle, name) for name in offered)


def test_status_has_the_reason_of_the_latest_save(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        ),
        RoundOpened(round=a_round()),
    )
    harness.append_as_agent(a_committed_checkpoint("a", reason="an epoch has ended"))
    assert handle.status().save_reason == "an epoch has ended"
    harness.append_as_agent(a_committed_checkpoint("own", report_index=1))
    assert handle.status().save_reason == "", "a report has no reason"


def test_status_has_the_reason_why_feeders_are_stopped(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    assert handle.status().feeders_stopped == ""
    harness.append_as_agent(FeedersStopped(reason="no torch"))
    assert handle.status().feeders_stopped == "no torch"


def test_attached_handles_have_the_same_status(harness: ClientHarness) -> None:
    start_run(harness.request())
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        ),
        RoundOpened(round=a_round()),
    )
    assert harness.attach_run().status() == start_run(harness.request()).status()
    assert harness.attach_run().url == start_run(harness.request()).url


def test_attaching_to_a_missing_run_raises(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="There is no run at") as missing:
        attach(tmp_path)
    assert "<storage_path>/<name>" in missing.value.do


def test_the_result_has_the_return_value_of_rank_0(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    key = RunKeyring().find(harness.agent_ledger.run_id)
    assert key is not None
    body = key.seal(cloudpickle.dumps({"answer": 42}), purpose=keys.result(1, 0))
    harness.agent_ledger.store.put(keys.result(1, 0), body)
    ended = FitEnded(outcome="finished", metrics={"loss": 0.5}, result_key=keys.result(1, 0))
    harness.clock.next_events = iter([lambda: harness.end_run(ended)])
    result = handle.result()
    assert (result.return_value, result.metrics) == ({"answer": 42}, {"loss": 0.5})
    assert harness.attach_run().result().return_value == {"answer": 42}, "also from a later handle"


def test_a_failed_last_save_is_logged(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    start_run(harness.request())
    harness.end_run(FitEnded(outcome="finished", last_save_error="rank 1: the bucket is gone"))
    harness.attach_run().result()
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "result.unsaved" in text]
    assert "the last save failed" in line
    assert "rank 1: the bucket is gone" in line


def test_without_the_key_the_return_value_is_none(
    harness: ClientHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(harness.request())
    harness.end_run(FitEnded(outcome="finished", metrics={"loss": 1}, result_key="x"))
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    result = harness.attach_run().result()
    assert (result.return_value, result.metrics) == (None, {"loss": 1})


def test_a_failed_run_raises_the_error_of_fit(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    failed = FitEnded(
        outcome="failed",
        reason="no",
        cause=FailureCause.WORKER,
        failures=(RankFailure(rank=1, kind="died", message="was killed"),),
    )
    harness.end_run(failed)
    with pytest.raises(WorkerGroupError, match="was killed"):
        handle.result()


def test_result_raises_timeout_error(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    started_at = harness.clock.now()
    with pytest.raises(TimeoutError, match="has not ended within 5 s"):
        handle.result(timeout_s=5)
    assert harness.clock.now() - started_at == pytest.approx(5.0, abs=0.2)
    assert harness.view.is_active


def test_cancel_is_idempotent(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        )
    )
    handle.cancel("enough")
    handle.cancel("again")
    harness.attach_run().cancel("and again")
    assert harness.view.cancel_reason == "enough"
    assert harness.view.next_slot == 6
    harness.end_run(FitEnded(outcome="cancelled", reason="enough"))
    with pytest.raises(RunCancelledError, match="enough"):
        handle.result()
    handle.cancel("after the end")
    assert harness.view.next_slot == 9


def test_cancel_without_a_save_ends_the_wait_for_one(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    handle.cancel("first")
    before = harness.view
    handle.cancel("at once", save=False)
    assert (before.saves_before_cancel, harness.view.saves_before_cancel) == (True, False)
    slots = harness.view.next_slot
    handle.cancel("again")
    handle.cancel("again", save=False)
    assert (harness.view.cancel_reason, harness.view.next_slot) == ("at once", slots)


def test_cancel_from_another_thread_while_waiting(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    cancelling = threading.Thread(target=handle.cancel)
    harness.clock.next_events = iter([cancelling.start, cancelling.join])
    with pytest.raises(RunCancelledError, match=r"cancel\(\) was called"):
        handle.result(timeout_s=60)
    assert harness.cloud.groups == {}, "the handle releases the machines itself"


def test_cancel_does_not_use_the_ledger_of_the_handle(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    before = handle._ledger.view
    handle.cancel()
    assert handle._ledger.view is before
    assert handle.status().state == "waiting"
    assert harness.view.cancel_reason is not None


def test_a_waiting_handle_supervises_the_run(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    for node in (0, 1):
        harness.cloud.reclaim_node(harness.cloud.submitted_tokens[0], node)
    with pytest.raises(TimeoutError):
        handle.result(timeout_s=10)
    assert len(harness.cloud.submitted_tokens) == 2


def test_without_the_key_a_handle_does_not_supervise(
    harness: ClientHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(harness.request())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    for node in (0, 1):
        harness.cloud.reclaim_node(harness.cloud.submitted_tokens[0], node)
    with pytest.raises(TimeoutError):
        harness.attach_run().result(timeout_s=60)
    assert len(harness.cloud.submitted_tokens) == 1
    assert not (tmp_path / "another machine").exists(), "no key is created"


class Broken:
    """A headless leader that raises."""

    def tick(self, _now: float) -> float:
        raise ZeroDivisionError("a bug")


def test_a_copy_of_a_run_is_not_supervised(
    harness: ClientHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_run(harness.request())
    copy = shutil.copytree(harness.url, tmp_path / "copy")
    (link := tmp_path / "link").symlink_to(harness.url)
    assert attach(link).headless_leader is not None
    handle = attach(copy)
    assert handle.headless_leader is None
    warning = capsys.readouterr().err
    assert "run.unsupervised: this process does not replace lost machines of the run" in warning
    assert f"it is a copy of the run in {harness.url}" in warning
    assert handle.status().is_verified


def test_an_error_of_the_supervisor_thread_is_raised_by_result(
    harness: ClientHarness,
) -> None:
    handle = start_run(harness.request())
    handle.headless_leader = Broken()  # type: ignore[assignment]  # it only ever ticks
    handle.supervise_in_background()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        handle.result(timeout_s=30)


def test_result_stops_waiting_for_machines_that_are_not_released(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = start_run(harness.request())
    harness.cloud.call_error = ProvisionError("the cloud is away")
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=9, coordinator_address=a_member(0).coordinator_address
        ),
        FINISHED,
    )
    started_at = harness.clock.now()
    assert handle.result().metrics == {"loss": 0.5}
    assert 120.0 <= harness.clock.now() - started_at < 125.0
    expected = f"run.machines_not_released groups={harness.cloud.submitted_tokens[0]}"
    assert expected in capsys.readouterr().err


def test_result_waits_shortly_for_requests_that_were_never_answered(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.cloud.submit_results = [ConnectionError("no route")]
    handle = start_run(harness.request())
    harness.cloud.call_error = ConnectionError("no route")
    handle.cancel("Ctrl-C")
    started_at = harness.clock.now()
    with pytest.raises(RunCancelledError):
        handle.result()
    assert 20.0 <= harness.clock.now() - started_at < 30.0
    err = capsys.readouterr().err
    assert "run.requests_unanswered: the backend never answered" in err
    assert harness.cloud.submitted_tokens[0] in err
    assert "run.machines_not_released" not in err


def test_result_looks_up_requests_that_the_last_agent_has_left(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    (token,) = harness.cloud.submitted_tokens
    late = Token("t-late")
    plan = replace(harness.view.groups[token].plan, token=late)
    elected = LeaderElected(
        leader=an_agent_id(0), epoch=9, coordinator_address=a_member(0).coordinator_address
    )
    planned = GroupPlanned(request=a_request(late), plan=plan)
    harness.append_as_agent(elected, planned, FINISHED)
    handle.supervise_once()
    harness.clock.wait(60.0)
    harness.append_as_agent(GroupsReleased(token=token))
    handle.result()
    assert harness.cloud.looked_up_tokens == [late]


def test_result_waits_until_a_request_that_is_not_listed_was_never_granted(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.cloud.traits = Traits(read_lag_s=60.0)
    harness.cloud.submit_results = [ConnectionError("no route")]
    handle = start_run(harness.request())
    handle.cancel("Ctrl-C")
    started_at = harness.clock.now()
    with pytest.raises(RunCancelledError):
        handle.result()
    assert 60.0 <= harness.clock.now() - started_at < 75.0
    assert "run.requests_unanswered" not in capsys.readouterr().err


def test_slow_look_ups_are_answers(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.cloud.traits = Traits(read_lag_s=60.0)
    harness.cloud.submit_results = [ConnectionError("no route")]
    harness.cloud.before_look_up = lambda: harness.clock.wait(25.0)
    handle = start_run(harness.request())
    handle.cancel("Ctrl-C")
    with pytest.raises(RunCancelledError):
        handle.result()
    assert "run.requests_unanswered" not in capsys.readouterr().err


def test_a_return_value_of_another_round_is_refused(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    key = RunKeyring().find(harness.agent_ledger.run_id)
    assert key is not None
    old = key.seal(cloudpickle.dumps("of the round before"), purpose=keys.result(1, 0))
    harness.agent_ledger.store.put(keys.result(2, 0), old)
    harness.end_run(FitEnded(outcome="finished", result_key=keys.result(2, 0)))
    with pytest.raises(IntegrityError):
        handle.result()


def test_reports_that_some_ranks_did_not_make_are_warned(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = start_run(harness.request())
    harness.end_run(FitEnded(outcome="finished", missing_reports="only 0 of 3 reports"))
    assert handle.result().metrics is None
    err = capsys.readouterr().err
    assert "result.reports_missing: only 0 of 3 reports" in err
    assert "call report() on every rank" in err


def test_logs_contain_the_output_of_all_agents(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    for n in (0, 1):
        agent = harness.agent_ledger
        agent.agent_id = an_agent_id(n)
        agent.publish_member(a_member(n))
        agent.store.put(keys.logs(an_agent_id(n), 0), encode({"rank": n, "text": "hello"}) + b"\n")
    assert list(handle.logs()) == ["(rank 0) hello", "(rank 1) hello"]
    assert list(handle.logs()) == list(harness.attach_run().logs()), "every call returns all lines"


def write_log(harness: ClientHarness, chunk: int, *lines: dict[str, object]) -> None:
    agent = harness.agent_ledger
    agent.publish_member(a_member(0))
    agent.store.put(
        keys.logs(an_agent_id(0), chunk), b"".join(encode(line) + b"\n" for line in lines)
    )


def test_followed_logs_end_with_the_run(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    write_log(harness, 0, {"rank": 0, "text": "first"})
    harness.clock.next_events = iter(
        [
            lambda: write_log(harness, 1, {"rank": 0, "text": "second"}, {"rank": 1, "text": "x"}),
            lambda: harness.end_run(FINISHED),
            lambda: write_log(harness, 2, {"rank": 0, "text": "last"}, {"end": True}),
        ]
    )
    followed = list(handle.logs(rank=0, follow=True))
    assert followed == ["(rank 0) first", "(rank 0) second", "(rank 0) last"]


def test_followed_logs_of_a_lost_agent_end_soon_after_the_run(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    write_log(harness, 0, {"rank": 0, "text": "first"})
    harness.end_run(FINISHED)
    before_s = harness.clock.now()
    assert list(handle.logs(follow=True)) == ["(rank 0) first"]
    assert 3.0 <= harness.clock.now() - before_s < 6.0


def test_the_metrics_are_those_of_all_reports(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    assert handle.metrics() == []
    line = {"round": 1, "report_index": 0, "checkpoint": None, "metrics": {"step": 7}}
    harness.agent_ledger.store.put(keys.reports(an_agent_id(0), 0), encode(line))
    assert [each.metrics for each in handle.metrics()] == [{"step": 7}]


def test_status_has_times_and_progress(harness: ClientHarness) -> None:
    before_ms = system.wall_ms()
    handle = start_run(harness.request())
    assert before_ms <= handle.status().started_at_ms <= system.wall_ms()
    assert handle.status().ended_at_ms == 0
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        )
    )
    line = {"round": 1, "report_index": 0, "checkpoint": None, "metrics": {"step": 7}}
    harness.agent_ledger.store.put(keys.reports(an_agent_id(0), 0), encode(line))
    assert handle.status().progress.step == 7


def test_watch_shows_output_and_events(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = start_run(harness.request())

    def opened() -> None:
        harness.append_as_agent(
            LeaderElected(
                leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
            ),
            RoundOpened(round=a_round(), reason="two"),
        )
        for n in (0, 1):
            chunk = encode({"rank": n, "text": f"line {n}"}) + b"\n" + encode({"end": True})
            harness.agent_ledger.store.put(keys.logs(an_agent_id(n), 0), chunk)

    harness.clock.next_events = iter([opened, lambda: harness.end_run(FINISHED)])
    handle.watch()
    out, err = capsys.readouterr()
    assert out == "(rank 0) line 0\n(rank 1) line 1\n"
    assert "round 1 started: two" in err
    assert "run finished" in err
    assert handle.final_result().metrics == {"loss": 0.5}


def test_watch_waits_a_limited_time_for_output(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        ),
        RoundOpened(round=a_round()),
    )
    harness.end_run(FINISHED)
    started_at = harness.clock.now()
    handle.watch()
    assert 3.0 <= harness.clock.now() - started_at < 4.0


def test_an_earlier_cancellation_is_visible_to_later_handles(harness: ClientHarness) -> None:
    start_run(harness.request())
    harness.append_as_agent(
        LeaderElected(
            leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
        ),
        CancelRequested(reason="enough"),
    )
    assert harness.attach_run().status().state == "waiting"
    harness.end_run(FitEnded(outcome="cancelled", reason="enough"))
    assert harness.attach_run().status().state == "cancelled"


def leave_unsettled_group(harness: ClientHarness) -> None:
    """End a fit without the release of its machines, and the next one at once."""
    start_run(harness.request())
    spec = harness.view.spec
    for event in (FINISHED, FitStarted(spec=spec), FINISHED):
        harness.append_as_agent(event)


def test_sweep_releases_groups_of_earlier_fits(harness: ClientHarness) -> None:
    leave_unsettled_group(harness)
    text = supervise_run(harness.url, duration_s=3600.0)
    assert text == "The run is finished; its machines are released."
    assert harness.cloud.groups == {}


def test_sweep_names_groups_of_earlier_fits_that_it_could_not_release(
    harness: ClientHarness,
) -> None:
    leave_unsettled_group(harness)
    harness.cloud.call_error = ConnectionError("no route")
    text = supervise_run(harness.url, duration_s=3600.0)
    assert text == (
        "The run is finished; its machines are released. Groups of earlier fits may still cost "
        f"money: {harness.cloud.submitted_tokens[0]} (local)."
    )


def test_sweep_does_not_claim_a_release_that_is_still_to_be_done(harness: ClientHarness) -> None:
    start_run(harness.request())
    harness.append_as_agent(FINISHED)
    harness.cloud.call_error = ConnectionError("no route")
    (token,) = harness.cloud.submitted_tokens
    text = supervise_run(harness.url, duration_s=1.0)
    assert text.startswith(f"The run is finished; machines {token} are not released yet: ")


def test_sweep_where_the_backend_cannot_be_opened_does_not_name_the_key(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(harness.request())

    def refuse(_name: str, _options: dict[str, Any]) -> FakeProvisioner:
        raise MissingExtraError("not installed", do="install it")

    monkeypatch.setattr(run_handle, "open_provisioner", refuse)
    with pytest.raises(ConfigError, match="cannot be supervised from this computer"):
        supervise_run(harness.url, duration_s=1.0)


def test_result_waits_in_steps_that_ctrl_c_can_end(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    waits_s: list[float | None] = []

    class Supervisor(threading.Thread):
        def is_alive(self) -> bool:
            return len(waits_s) < 3

        def join(self, timeout: float | None = None) -> None:
            waits_s.append(timeout)

    handle._supervisor = Supervisor()
    handle._supervisor_error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        handle.result()
    # Windows does not interrupt the wait for a thread.
    assert waits_s == [0.5, 0.5, 0.5]
