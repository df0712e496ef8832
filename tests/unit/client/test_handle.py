"""A handle: follow, ask, cancel, from any process; and mind the run while it waits."""

from __future__ import annotations

import threading
from pathlib import Path

import cloudpickle
import pytest

from spotfit.client.fit import begin
from spotfit.client.handle import attach
from spotfit.client.keyring import Keyring
from spotfit.core.codec import encode
from spotfit.core.errors import (
    IntegrityError,
    ProvisionError,
    RunCancelledError,
    RunNotFoundError,
    WorkerGroupError,
)
from spotfit.ledger import keys
from spotfit.model.events import (
    Blame,
    CancelRequested,
    FitEnded,
    LeaderElected,
    RankFailure,
    RoundOpened,
)
from spotfit.testing.builders import a_commit, a_member, a_round, an_agent
from tests.unit.client.door import Door

FINISHED = FitEnded("finished", metrics={"loss": 0.5})


def test_a_run_waits_runs_and_ends(door: Door) -> None:
    handle = begin(door.request())
    assert (handle.status().state, handle.status().machines) == ("waiting", 2)
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), RoundOpened(a_round()))
    status = handle.status()
    assert (status.name, status.state, status.round, status.workers) == ("digits", "running", 1, 2)
    door.write(FitEnded("failed", "a callback raised", Blame.PLATFORM))
    assert (handle.status().state, handle.status().why) == ("failed", "a callback raised")


def test_it_is_told_why_the_latest_checkpoint_was_saved(door: Door) -> None:
    handle = begin(door.request())
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), RoundOpened(a_round()))
    door.write(a_commit("a", why="an epoch has ended"))
    assert handle.status().saved_why == "an epoch has ended"
    door.write(a_commit("own", report=1))
    assert handle.status().saved_why == "", "the user has"


def test_whoever_attaches_sees_the_same(door: Door) -> None:
    begin(door.request())
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), RoundOpened(a_round()))
    assert door.attached().status() == begin(door.request()).status()
    assert door.attached().url == begin(door.request()).url


def test_there_is_nothing_to_attach_to_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="There is no run at") as missing:
        attach(tmp_path)
    assert "<storage_path>/<name>" in missing.value.do


def test_the_result_is_what_rank_0_returned(door: Door) -> None:
    handle = begin(door.request())
    key = Keyring().find(door.agent.run_id)
    assert key is not None
    body = key.seal(cloudpickle.dumps({"answer": 42}), purpose=keys.result(1, 0))
    door.agent.store.put(keys.result(1, 0), body)
    ended = FitEnded("finished", metrics={"loss": 0.5}, result_key=keys.result(1, 0))
    door.clock.coming = iter([lambda: door.agents_end_it(ended)])
    result = handle.result()
    assert (result.return_value, result.metrics) == ({"answer": 42}, {"loss": 0.5})
    assert door.attached().result().return_value == {"answer": 42}, "later and from elsewhere"


def test_with_a_result_comes_word_of_a_last_save_that_was_lost(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(door.request())
    door.agents_end_it(FitEnded("finished", unsaved="rank 1: the bucket is gone"))
    door.attached().result()
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "result.unsaved" in text]
    assert "the last save is no checkpoint" in line
    assert "rank 1: the bucket is gone" in line


def test_without_the_key_there_is_a_result_but_not_what_was_returned(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(door.request())
    door.agents_end_it(FitEnded("finished", metrics={"loss": 1}, result_key="x"))
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    result = door.attached().result()
    assert (result.return_value, result.metrics) == (None, {"loss": 1})


def test_a_failed_run_raises_what_fit_raises(door: Door) -> None:
    handle = begin(door.request())
    failed = FitEnded("failed", "no", Blame.WORKER, (RankFailure(1, "died", "was killed"),))
    door.agents_end_it(failed)
    with pytest.raises(WorkerGroupError, match="was killed"):
        handle.result()


def test_who_waits_only_so_long_is_told_that_it_goes_on(door: Door) -> None:
    handle = begin(door.request())
    begun = door.clock.now()
    with pytest.raises(TimeoutError, match="has not ended within 5 s"):
        handle.result(timeout_s=5)
    assert door.clock.now() - begun == pytest.approx(5.0, abs=0.2)
    assert door.view.active


def test_to_cancel_is_to_ask_once(door: Door) -> None:
    handle = begin(door.request())
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub))
    handle.cancel("enough")
    handle.cancel("again")
    door.attached().cancel("and again")
    assert door.view.cancelled == "enough"
    assert door.view.next_slot == 6
    door.agents_end_it(FitEnded("cancelled", "enough"))
    with pytest.raises(RunCancelledError, match="enough"):
        handle.result()
    handle.cancel("of a run that is over")
    assert door.view.next_slot == 9


def test_another_thread_may_cancel_while_one_waits(door: Door) -> None:
    handle = begin(door.request())
    cancelling = threading.Thread(target=handle.cancel)
    door.clock.coming = iter([cancelling.start, cancelling.join])
    with pytest.raises(RunCancelledError, match=r"cancel\(\) was called"):
        handle.result(timeout_s=60)
    assert door.cloud.groups == {}, "nobody else minds it, so it lets the machines go itself"


def test_to_cancel_touches_nothing_that_another_thread_may_hold(door: Door) -> None:
    handle = begin(door.request())
    before = handle._ledger.view
    handle.cancel()
    assert handle._ledger.view is before
    assert handle.status().state == "waiting"
    assert door.view.cancelled is not None


def test_a_handle_that_waits_minds_the_run(door: Door) -> None:
    handle = begin(door.request())
    for node in (0, 1):
        door.cloud.lose(door.cloud.submits[0], node)
    with pytest.raises(TimeoutError):
        handle.result(timeout_s=10)
    assert len(door.cloud.submits) == 2


def test_without_the_key_nobody_minds_it(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(door.request())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "another machine"))
    for node in (0, 1):
        door.cloud.lose(door.cloud.submits[0], node)
    with pytest.raises(TimeoutError):
        door.attached().result(timeout_s=60)
    assert len(door.cloud.submits) == 1
    assert not (tmp_path / "another machine").exists(), "and no key is made up"


class Broken:
    """A caretaker with a bug."""

    def tick(self, _now: float) -> float:
        raise ZeroDivisionError("a bug of ours")


def test_what_ended_the_thread_that_minds_is_raised_where_it_is_waited_for(door: Door) -> None:
    handle = begin(door.request())
    handle.caretaker = Broken()  # type: ignore[assignment]  # it only ever ticks
    handle.mind_in_background()
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        handle.result(timeout_s=30)


def test_a_result_does_not_wait_for_ever_for_machines_that_cannot_be_let_go(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = begin(door.request())
    door.cloud.broken = ProvisionError("the cloud is away")
    door.write(LeaderElected(an_agent(0), 9, a_member(0).hub), FINISHED)
    begun = door.clock.now()
    assert handle.result().metrics == {"loss": 0.5}
    assert 120.0 <= door.clock.now() - begun < 125.0
    left = f"run.left_behind groups={door.cloud.submits[0]}"
    assert left in capsys.readouterr().err


def test_what_was_returned_must_be_of_this_very_round(door: Door) -> None:
    handle = begin(door.request())
    key = Keyring().find(door.agent.run_id)
    assert key is not None
    old = key.seal(cloudpickle.dumps("of the round before"), purpose=keys.result(1, 0))
    door.agent.store.put(keys.result(2, 0), old)
    door.agents_end_it(FitEnded("finished", result_key=keys.result(2, 0)))
    with pytest.raises(IntegrityError):
        handle.result()


def test_logs_are_of_every_agent_there_ever_was(door: Door) -> None:
    handle = begin(door.request())
    for n in (0, 1):
        agent = door.agent
        agent.me = an_agent(n)
        agent.offer(a_member(n))
        agent.store.put(keys.logs(an_agent(n), 0), encode({"rank": n, "text": "hello"}) + b"\n")
    assert list(handle.logs()) == ["(rank 0) hello", "(rank 1) hello"]
    assert list(handle.logs()) == list(door.attached().logs()), "all of them, every time"


def test_while_it_watches_the_output_and_the_story_are_shown(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = begin(door.request())

    def opened() -> None:
        door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), RoundOpened(a_round(), "two"))
        for n in (0, 1):
            chunk = encode({"rank": n, "text": f"line {n}"}) + b"\n" + encode({"end": True})
            door.agent.store.put(keys.logs(an_agent(n), 0), chunk)

    door.clock.coming = iter([opened, lambda: door.agents_end_it(FINISHED)])
    handle.watch()
    out, err = capsys.readouterr()
    assert out == "(rank 0) line 0\n(rank 1) line 1\n"
    assert "round 1: two" in err
    assert "the run is finished" in err
    assert handle.outcome().metrics == {"loss": 0.5}


def test_last_words_are_waited_for_but_not_for_ever(door: Door) -> None:
    handle = begin(door.request())
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), RoundOpened(a_round()))
    door.agents_end_it(FINISHED)
    begun = door.clock.now()
    handle.watch()
    assert 3.0 <= door.clock.now() - begun < 4.0


def test_a_cancel_that_came_before_is_seen_by_a_later_handle(door: Door) -> None:
    begin(door.request())
    door.write(LeaderElected(an_agent(0), 2, a_member(0).hub), CancelRequested("enough"))
    assert door.attached().status().state == "waiting"
    door.agents_end_it(FitEnded("cancelled", "enough"))
    assert door.attached().status().state == "cancelled"
