"""The leader: what it tells its agents and callbacks, and what it does when the store is slow."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.agent.ports import FromAgent, Said
from spotfit.checkpoint.manifest import Manifest, manifests_of_all
from spotfit.checkpoint.save import record
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    LeaderElected,
    NodeLost,
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationAsked,
)
from spotfit.model.hooks import Ask
from spotfit.model.spec import Keep, Limits, ValidationSpec, Vigil
from spotfit.model.watch import Trouble
from spotfit.model.wire import (
    Call,
    Damaged,
    Files,
    Gather,
    Gathered,
    Named,
    Outcome,
    Overdue,
    Present,
    Proceed,
    Report,
    Returned,
    Running,
    Saved,
    Unsaved,
    Up,
)
from tests.unit.agent.world import TEMPO, World

ANY_FAILURES = Limits(worker=-1)


def saved_by_rank_0(world: World, name: str, report: int = 0) -> None:
    """The files of a checkpoint, and their manifest, as a worker leaves them."""
    world.store.put(f"{name}/model", b"weights")
    part = Manifest(name, 1, report, 0, (0,), {"loss": 1.0}, ())
    world.store.put(keys.manifest(name, 1, 0), encode(part))


# --- reports -------------------------------------------------------------------------------------


def test_callbacks_hear_every_report_of_all_ranks_in_order() -> None:
    world = World(callbacks=True)
    world.train()
    world.report(0, loss=3)
    world.checkpoint(1, "c1", loss=2)
    world.report(2, loss=1)
    assert world.audience.reports == [
        ([{"rank": 0, "loss": 3}, {"rank": 1, "loss": 3}], None),
        ([{"rank": 0, "loss": 2}, {"rank": 1, "loss": 2}], "c1"),
        ([{"rank": 0, "loss": 1}, {"rank": 1, "loss": 1}], None),
    ]


def test_callbacks_hear_of_a_checkpoint_once_it_is_committed() -> None:
    world = World(callbacks=True)
    world.train()
    world.store.moody = lambda: True
    world.checkpoint(0, "c1")
    assert world.audience.reports == []
    world.store.moody = lambda: False
    world.until(lambda: world.audience.reports)
    assert world.audience.reports[0][1] == "c1"


def test_callbacks_hear_what_was_committed_together_with_the_end_of_the_round() -> None:
    world = World(callbacks=True, limits=ANY_FAILURES)
    world.train()
    world.say(1, Report(0, msgspec.Raw(b'{"rank":1}')))
    world.say(0, Files(0, msgspec.Raw(b'{"rank":0}'), "c1"))
    world.store.moody = lambda: True
    world.say(0, Saved(0, "c1", 1))
    world.holder(1).crew.exit(1, "was killed by SIGKILL")
    world.run(1.0)
    world.store.moody = lambda: False
    world.until(lambda: world.last(RoundClosed))
    assert world.last(CheckpointCommitted).name == "c1"
    assert world.audience.reports == [([{"rank": 0}, {"rank": 1}], "c1")]


def test_callbacks_hear_of_failures_by_rank() -> None:
    world = World(callbacks=True, limits=ANY_FAILURES)
    world.train()
    world.fail(1, "KeyError: 'x'")
    world.until(lambda: world.audience.failures)
    assert world.audience.failures == [{1: "Traceback\nKeyError: 'x'"}]


def test_a_callback_that_raises_ends_the_run() -> None:
    world = World(callbacks=True)
    world.train()
    world.audience.raised = "Traceback\nKeyError: 'x'"
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert (ended.outcome, ended.blame) == ("failed", Blame.PLATFORM)
    assert ended.failures[0].told == "Traceback\nKeyError: 'x'"


def test_the_end_waits_until_callbacks_have_heard_everything() -> None:
    world = World(callbacks=True)
    world.train()
    world.audience.caught_up = False
    world.finish(1)
    world.finish(0)
    world.run(2.0)
    assert world.view.active
    world.audience.caught_up = True
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).outcome == "finished"


# --- a backend's hooks ---------------------------------------------------------------------------


def hooks_done(world: World) -> None:
    world.hooks.left = []
    world.run(0.2)


def to_training(world: World) -> None:
    """All workers have come through the hooks before the function."""
    world.train()
    for stage in ("form", "train"):
        for rank in (0, 1):
            world.say(rank, Present(stage))
        hooks_done(world)


def test_workers_wait_for_the_hooks_and_hooks_for_the_workers() -> None:
    world = World(hooks=True)
    world.train()
    world.say(0, Present("form"))
    assert world.hooks.ordered == []
    world.say(1, Present("form"))
    assert world.hooks.ordered == [("on_start", 1, 2)]
    assert world.heard(0, Proceed) == []
    hooks_done(world)
    assert world.heard(0, Proceed) == world.heard(1, Proceed) == [Proceed("form")]


def test_calls_pass_through_the_leader_both_ways() -> None:
    world = World(hooks=True)
    world.train()
    world.hooks.wants = [Ask(1, 7, (1,), b"call")]
    world.run(0.2)
    assert world.heard(1, Call) == [Call(7, b"call")]
    world.say(1, Outcome(7, b"value"))
    world.run(0.2)
    assert world.hooks.answers == [(1, 1, Outcome(7, b"value"))]


def test_the_run_is_finished_once_the_last_hook_is_done_and_the_workers_have_left() -> None:
    world = World(hooks=True)
    to_training(world)
    for rank in (0, 1):
        world.say(rank, Returned(0))
    world.run(2.0)
    assert world.view.active
    assert world.hooks.ordered[-1] == ("on_shutdown", 1, 2)
    hooks_done(world)
    assert world.heard(0, Proceed)[-1] == Proceed("leave")
    world.run(2.0)
    assert world.view.active, "they are leaving"
    for rank in (0, 1):
        world.holder(rank).crew.exit(rank, clean=True)
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).outcome == "finished"


def test_a_worker_that_dies_before_it_is_let_go_is_not_waited_for_by_the_last_hook() -> None:
    world = World(hooks=True)
    to_training(world)
    for rank in (0, 1):
        world.say(rank, Returned(0))
    world.holder(1).crew.exit(1, "was killed by SIGKILL")
    world.run(0.2)
    assert world.hooks.lost == [1]
    hooks_done(world)
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).outcome == "finished", "all functions had returned"


def test_a_hook_that_raises_ends_the_run() -> None:
    world = World(hooks=True, limits=ANY_FAILURES)
    world.train()
    world.hooks.raised = Trouble("the backend's on_start raised", "Traceback\nKeyError: 'x'", "f/1")
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert (ended.blame, ended.why) == (Blame.PLATFORM, "the backend's on_start raised")
    assert ended.failures == (RankFailure(-1, "raised", "Traceback\nKeyError: 'x'", "f/1"),)


def test_every_round_goes_through_the_hooks_again() -> None:
    world = World(hooks=True, limits=ANY_FAILURES)
    to_training(world)
    world.fail(1)
    world.until(lambda: world.view.round and world.view.round.number == 2 and world.training)
    assert world.hooks.ordered[2:] == [("on_shutdown", 1, 2)]
    for rank in (0, 1):
        world.say(rank, Present("form"))
    assert world.hooks.ordered[-1] == ("on_start", 2, 2)


def test_the_end_waits_for_the_hook_of_the_last_round_that_failed() -> None:
    world = World(hooks=True)
    to_training(world)
    world.fail(1)
    world.run(2.0)
    assert world.view.active
    hooks_done(world)
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).blame is Blame.WORKER


# --- hangs ---------------------------------------------------------------------------------------


def begun(world: World) -> None:
    world.train()
    for rank in (0, 1):
        world.say(rank, Running())


def test_a_worker_that_does_not_answer_ends_its_round_and_the_run_says_where_to_look() -> None:
    world = World(limits=Limits(worker=1))
    begun(world)
    world.holder(1).crew.miss(1, 601.0)
    took_s = world.until(lambda: world.last(RoundClosed))
    assert took_s < 2.0
    closed = world.last(RoundClosed)
    assert closed.blame is Blame.WORKER
    [failure] = closed.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    [said] = world.said
    assert said in failure.told
    key = keys.stacks(world.leader.me, 1, 1)
    assert key in said
    assert b"=== rank 0: at work (0)" in world.object_at(key)
    world.until(lambda: world.training)


def test_one_whose_machine_cannot_tell_is_ended_all_the_same() -> None:
    world = World(limits=ANY_FAILURES)
    begun(world)
    for node in world.nodes.values():
        node.crew.tells = False
    world.holder(1).crew.miss(1, 601.0)
    took_s = world.until(lambda: world.last(RoundClosed), within_s=60.0)
    assert took_s == pytest.approx(30.0, abs=1.0)


def test_one_that_answers_again_in_time_is_left_alone() -> None:
    world = World()
    begun(world)
    for node in world.nodes.values():
        node.crew.tells = False
    world.holder(1).crew.miss(1, 601.0)
    world.run(5.0)
    world.holder(1).crew.miss(1, 0.0)
    world.run(60.0)
    assert (world.all_of(RoundClosed), world.said) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_round_without_progress_is_looked_into_and_ended_where_that_is_wanted(
    ends: bool,
) -> None:
    world = World(vigil=Vigil(hang_s=60.0, hang_ends=ends), limits=ANY_FAILURES)
    begun(world)
    world.report(0)
    world.run(59.0)
    assert world.said == []
    world.run(2.0)
    assert len(world.said) == 1
    assert (world.last(RoundClosed) is not None) == ends
    if not ends:
        world.run(120.0)
        assert len(world.said) == 1, "once"


def test_workers_that_never_begin_cost_the_platform() -> None:
    world = World(vigil=Vigil(start_s=20.0), limits=Limits(platform=0))
    world.train()
    world.say(0, Running())
    world.until(lambda: world.view.ended)
    ended = world.last(FitEnded)
    assert ended.blame is Blame.PLATFORM
    assert "rank 1 has not begun 20 s after" in ended.why


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_kept_in_the_bucket_line_by_line() -> None:
    world = World()
    world.train()
    world.report(0, loss=3)
    world.checkpoint(1, "c1", loss=2)
    leader = world.leader.me
    world.finish(1)
    world.finish(0)
    world.until(lambda: all(node.over for node in world.nodes.values()))
    chunks = [world.object_at(key) for (key, _) in world.store.list(f".spotfit/reports/{leader}")]
    lines = [msgspec.json.decode(line) for line in b"".join(chunks).splitlines()]
    assert [(one["round"], one["n"], one["checkpoint"]) for one in lines] == [
        (1, 0, None),
        (1, 1, "c1"),
    ]
    assert [one["metrics"]["loss"] for one in lines] == [3, 2]


# --- checkpoints ---------------------------------------------------------------------------------


def test_what_is_not_kept_is_dropped_and_its_files_deleted() -> None:
    world = World(keep=Keep(last=1))
    world.train()
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    world.until(lambda: world.last(CheckpointDropped))
    world.run(1.0)
    assert world.last(CheckpointDropped).name == "c0"
    left = {key for (key, _) in world.store.list() if "/c0/" in key or key.startswith("c0/")}
    assert left == set()
    assert world.object_at("c1/model") == b"weights"


def test_a_store_that_fails_while_files_are_deleted_leaves_none_of_them() -> None:
    world = World(keep=Keep(last=1))
    world.train()
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
    world.checkpoint(0, "c0")
    delete, failures = world.store.delete, [1, 2, 3]

    def moody_delete(key: str) -> None:
        if failures:
            failures.pop()
            world.store.moody = lambda: True
        delete(key)

    def calm() -> bool:
        world.store.moody = lambda: False
        return bool(failures)

    world.store.delete = moody_delete  # type: ignore[method-assign]  # fails three times
    world.checkpoint(1, "c1")
    world.until(lambda: not calm())
    world.run(2.0)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())


def test_a_name_that_was_used_before_is_given_with_a_mark_and_what_it_meant_makes_room() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    saved_by_rank_0(world, "last")
    world.checkpoint(0, "last")
    for n, base in ((1, "last"), (2, "last@1-1")):
        world.say(1, Report(n, msgspec.Raw(b"{}")))
        world.say(0, Files(n, msgspec.Raw(b"{}"), "last"))
        named = world.heard(0, Named)[-1]
        assert (named.name, named.base) == (f"last@1-{n}", base)
        world.run(1.0)
        assert world.object_at("last/model" if n == 1 else "last@1-1/model") == b"weights"
        saved_by_rank_0(world, named.name, n)
        world.say(0, Saved(n, named.name))
        world.run(1.0)
    assert [one.name for one in world.view.checkpoints] == ["last@1-2"]
    left = {key.partition("/")[0] for (key, _) in world.store.list()}
    assert left == {".spotfit", "last@1-2"}
    world.fail(1)
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "last"))
    named = world.heard(0, Named)[-1]
    assert (named.name, named.base) == ("last@2-0", "last@1-2")


def test_of_what_a_user_saves_into_one_folder_only_the_last_counts() -> None:
    world = World(keep=Keep(last=3))
    world.train()
    for n, name in enumerate(("mine", "mine@1-1", "mine@1-2")):
        world.store.put("mine/model", b"x" * (n + 1))
        world.say(1, Report(n, msgspec.Raw(b"{}")))
        world.say(0, Files(n, msgspec.Raw(b"{}"), "mine", ours=False))
        record(world.store, Manifest(name, 1, n, 0, (0,), {}, (), at="mine"))
        world.say(0, Saved(n, name, n + 1, at="mine"))
        world.run(1.0)
    assert [one.name for one in world.view.checkpoints] == ["mine@1-2"]
    assert world.object_at("mine/model") == b"xxx"
    assert [
        one.name for one in manifests_of_all(world.store, ["mine", "mine@1-1", "mine@1-2"])
    ] == ["mine@1-2"]


def snapshot(world: World, n: int) -> tuple[str, str]:
    """All ranks hand a snapshot over as their n-th report, and it is committed: its name, and that
    of the one it may share files with."""
    for rank in (0, 1):
        world.say(rank, Files(n, msgspec.Raw(b"{}"), shares=True))
    named = world.heard(0, Named)[-1]
    for rank in (0, 1):
        world.say(rank, Saved(n, named.name, 10))
    world.until(lambda: world.last(CheckpointCommitted).name == named.name)
    return named.name, named.base


def test_a_snapshot_shares_files_with_the_one_before_unless_that_is_damaged() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    first, base = snapshot(world, 0)
    assert base == ""
    second, base = snapshot(world, 1)
    assert base == first
    world.fail(1)
    world.train()
    world.say(0, Damaged(second))
    third, base = snapshot(world, 0)
    assert base == ""
    assert snapshot(world, 1)[1] == third


def test_what_an_earlier_leader_may_have_known_to_be_damaged_is_not_shared() -> None:
    world = World()
    world.train()
    snapshot(world, 0)
    world.say(0, Damaged(snapshot(world, 1)[0]))
    gone = world.leader
    world.kill(gone)
    world.until(lambda: world.last(RoundOpened).round.number == 2 and world.training)
    assert world.last(LeaderElected).lost == gone.me
    first, base = snapshot(world, 0)
    assert base == ""
    assert snapshot(world, 1)[1] == first


def half_saved_by_rank_0(world: World, n: int) -> str:
    """All report; rank 0 is given a name, and dies while it uploads."""
    world.say(1, Report(n, msgspec.Raw(b"{}")))
    world.say(0, Files(n, msgspec.Raw(b"{}")))
    name = str(world.heard(0, Named)[-1].name)
    world.store.put(f"{name}/half", b"we")
    world.run(0.5)
    return name


def test_what_a_dead_worker_left_half_saved_goes_when_the_next_round_has_begun() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    saved_by_rank_0(world, "c0")
    world.checkpoint(0, "c0")
    half = half_saved_by_rank_0(world, 1)
    world.run(5.0)
    assert world.object_at(f"{half}/half"), "its round may still finish it"
    world.holder(0).crew.exit(0, "was killed by SIGKILL")
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    world.run(1.0)
    assert not any(half in key for (key, _) in world.store.list())
    assert world.object_at("c0/model") == b"weights"


def test_a_successor_finishes_what_was_dropped_and_not_deleted() -> None:
    world = World(keep=Keep(last=1))
    world.train()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    world.until(lambda: world.last(CheckpointDropped))
    world.kill(world.leader)
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.until(lambda: world.training, within_s=60)
    world.run(1.0)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())
    assert world.object_at("c1/model") == b"weights"


def test_so_does_one_who_takes_over_after_the_training() -> None:
    world = World(keep=Keep(last=1), validation=ValidationSpec())
    world.train()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}", asked=ValidationAsked() if n else None)
    world.until(lambda: world.last(CheckpointDropped) and world.validating)
    validates, leader = world.validating, world.leader
    for rank in (1, 0):
        world.finish(rank)
    world.until(lambda: world.last(TrainingEnded))
    world.kill(leader)
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.until(lambda: world.leader is validates, within_s=60)
    world.until(lambda: not any(key.startswith("c0/") for (key, _) in world.store.list()))
    assert not any("/c0/" in key for (key, _) in world.store.list())
    assert world.object_at("c1/model") == b"weights"


@pytest.mark.parametrize("dies", [True, False])
def test_a_name_that_an_earlier_round_has_left_half_saved_is_not_given_again(*, dies: bool) -> None:
    """A straggler may still upload files of that name, or somebody delete them."""
    world = World(limits=ANY_FAILURES)
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "half"))
    assert world.heard(0, Named)[-1].name == "half"
    if dies:
        world.run(0.5)
        world.kill(world.leader)
        world.until(lambda: world.training and world.last(RoundOpened).round.number == 2)
    else:
        world.fail(1)
        world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "half"))
    named = world.heard(0, Named)[-1]
    assert (named.name, named.base) == ("half@2-0", "")


def test_the_leader_stays_until_what_was_dropped_is_deleted() -> None:
    world = World(keep=Keep(last=1))
    world.train()
    delete = world.store.delete
    world.store.delete = _no_answer  # type: ignore[method-assign, assignment]  # the store fails
    for n in (0, 1):
        saved_by_rank_0(world, f"c{n}", n)
        world.checkpoint(n, f"c{n}")
    leader = world.leader
    world.finish(1)
    world.finish(0)
    world.until(lambda: world.view.ended)
    world.run(3.0)
    assert not leader.over
    world.store.delete = delete  # type: ignore[method-assign]  # it is well again
    world.until(lambda: leader.over)
    assert not any(key.startswith("c0/") for (key, _) in world.store.list())


def test_the_leader_does_not_stay_for_what_is_kept_only_for_an_upload_that_shares_it() -> None:
    """A failed training's last upload came in, and its files are listed from then on."""
    world = World()
    world.train()
    saved_by_rank_0(world, "last")
    world.checkpoint(0, "last")
    world.say(1, Report(1, msgspec.Raw(b"{}")))
    world.say(0, Files(1, msgspec.Raw(b"{}"), "last"))
    named = world.heard(0, Named)[-1]
    assert (named.name, named.base) == ("last@1-1", "last")
    leader, crew = world.leader, world.holder(0).crew
    crew.carrying = 1
    world.fail(1)
    world.run(1.0)
    late = Manifest(named.name, 1, 1, 0, (0,), {}, ())
    world.store.put(late.key, encode(late))
    crew.carrying = None
    world.until(lambda: world.view.ended, within_s=200)
    assert world.last(CheckpointDropped).name == "last"
    world.until(lambda: leader.over, within_s=200)


def _no_answer(_key: str) -> None:
    raise TransientStoreError("no answer")


# --- rounds --------------------------------------------------------------------------------------


def dies_while_its_upload_goes_on(world: World) -> None:
    """Rank 0 trains for ten seconds, gives its files away, and dies before they are there."""
    world.train()
    world.run(10.0)
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    crew = world.holder(0).crew
    crew.carrying = 1
    crew.exit(0, "was killed by SIGKILL")
    world.run(5.0)


def test_the_end_tells_of_a_last_save_that_is_no_checkpoint() -> None:
    world = World()
    world.train()
    for rank in (0, 1):
        world.say(rank, Files(0, msgspec.Raw(b"{}"), "c1"))
    world.say(1, Unsaved(0, "the bucket is gone"))
    for rank in (0, 1):
        world.say(rank, Returned(1))
        world.holder(rank).crew.exit(rank, clean=True)
    world.until(lambda: world.view.ended)
    assert world.last(FitEnded).unsaved == "rank 1: the bucket is gone"


@pytest.mark.parametrize("failures", [-1, 0])
def test_what_a_dead_worker_gave_away_is_committed_before_anything_else(failures: int) -> None:
    world = World(limits=Limits(worker=failures))
    dies_while_its_upload_goes_on(world)
    assert world.view.round is None, "the next round waits for it"
    assert world.view.active, "and so does the end"
    saved_by_rank_0(world, "c1")
    for node in world.nodes.values():
        node.crew.carrying = None
    world.until(lambda: world.view.ended or world.view.round)
    assert [one.name for one in world.view.checkpoints] == ["c1"]
    if failures:
        assert world.last(RoundOpened).round.checkpoint == "c1"


def test_an_upload_that_takes_longer_than_it_is_worth_is_not_awaited() -> None:
    world = World(limits=ANY_FAILURES)
    dies_while_its_upload_goes_on(world)
    world.until(lambda: world.training)
    assert world.last(RoundOpened).round.checkpoint is None
    assert all(node.crew.carrying is None for node in world.nodes.values()), "it was given up"


def test_a_machine_that_goes_takes_its_uploads_along() -> None:
    world = World(limits=ANY_FAILURES)
    dies_while_its_upload_goes_on(world)
    carrying = next(node for node in world.nodes.values() if node.crew.carrying is not None)
    world.kill(carrying)
    assert world.until(lambda: world.training) < 8.0, "nobody waits for the dead"


def test_a_checkpoint_that_is_ready_is_committed_before_its_round_is_closed() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    world.store.moody = lambda: True
    world.say(0, Saved(0, "c1"))
    world.holder(1).crew.exit(1, "was killed by SIGKILL")
    world.run(1.0)
    world.store.moody = lambda: False
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    kinds = [type(entry.event) for entry in world.entries]
    assert kinds.index(CheckpointCommitted) < kinds.index(RoundClosed)
    assert world.view.round is not None
    assert world.view.round.checkpoint == "c1"


def test_a_round_that_somebody_has_left_behind_already_is_over_at_once() -> None:
    world = World()
    world.boots = False
    world.boot(Token("t-1"), 0)
    left = world.boot(Token("t-1"), 1)
    left.agent._shift.halt(1)  # by a leader before, of whom nobody else has heard
    took_s = world.until(lambda: world.training)
    assert took_s < 5.0
    assert world.view.round is not None
    assert world.view.round.number == 2


def test_who_was_away_when_its_round_was_given_up_is_told_when_it_is_back() -> None:
    """Its connection breaks while the entry that opens the round is on its way."""
    world = World()
    world.boots = False
    leader = world.boot(Token("t-1"), 0)
    world.until(lambda: world.last(LeaderElected).leader == leader.me)
    world.run(0.5)
    world.hang(leader)
    other = world.boot(Token("t-1"), 1)
    world.run(1.0)
    other.asleep = True
    other.net.cut()
    world.run(0.2)
    leader.crew.immortal = True  # its worker takes a moment to end
    world.come_back()
    world.run(0.2)
    assert world.all_of(RoundClosed) == []
    other.asleep = False
    world.run(0.2)
    leader.crew.immortal = False
    world.until(lambda: world.training)
    assert [one.blame for one in world.all_of(RoundClosed)] == [Blame.NETWORK]
    assert other.crew.rounds == [2], "it never began what was over already"


def test_what_a_moody_store_prevented_does_not_wait_for_the_next_long_look() -> None:
    world = World()
    world.train()
    world.say(1, Report(0, msgspec.Raw(b"{}")))
    world.say(0, Files(0, msgspec.Raw(b"{}"), "c1"))
    world.run(5.0)  # all is well: the leader means to look again in half a minute
    world.store.moody = lambda: True
    world.say(0, Saved(0, "c1"))
    world.run(1.0)
    world.store.moody = lambda: False
    took_s = world.until(lambda: world.last(CheckpointCommitted))
    assert took_s < 1.0


def test_a_worker_that_talks_nonsense_has_failed_and_its_leader_has_not() -> None:
    world = World(limits=ANY_FAILURES)
    world.train()
    crew = world.holder(1).crew
    crew._events.append(Said(1, 1, [msgspec.Raw(b'{"type":"saved","name":"\xff"}')]))
    world.until(lambda: world.last(RoundClosed))
    assert "sent something unreadable" in world.last(RoundClosed).failures[0].told
    assert not world.leader.over


def test_a_collective_that_waits_too_long_names_who_never_came() -> None:
    world = World(collective_timeout_s=3.0)
    world.train()
    world.say(0, Gather("barrier", 0))
    world.run(2.8)
    assert world.heard(0, Gathered) == []
    world.run(0.4)
    assert world.heard(0, Gathered) == [Gathered("barrier", 0, missing=(1,))]


def test_a_collective_that_waits_long_says_for_whom_as_often_as_the_run_wants() -> None:
    world = World(collective_warn_s=2.0)
    world.train()
    world.say(0, Gather("barrier", 0))
    world.run(4.5)
    assert [one.missing for one in world.heard(0, Overdue)] == [(1,), (1,)]
    assert world.heard(1, Overdue) == []


def test_a_silent_agent_is_given_up_though_its_connection_stands() -> None:
    world = World()
    world.train()
    silent = next(node for node in world.nodes.values() if node is not world.leader)
    silent.asleep = True
    took_s = world.until(lambda: world.last(RoundClosed))
    assert TEMPO.silent_s < took_s < TEMPO.silent_s + 3
    world.until(lambda: world.last(NodeLost))
    assert world.last(NodeLost).agent == silent.me


def test_all_are_told_of_news_without_reading_the_bucket() -> None:
    world = World()
    world.train()
    follower = next(node for node in world.nodes.values() if node is not world.leader)
    world.checkpoint(0, "c1")
    assert follower.ledger.view.latest_checkpoint is not None, "at once"


# --- a store that is slow to tell what was done --------------------------------------------------


def test_what_is_said_in_a_round_before_its_leader_knows_of_it_is_heard() -> None:
    """Agents may find a round in the bucket while the leader still waits for the answer to its
    own entry. A barrier that was passed over then would wait for ever."""
    world = World(limits=ANY_FAILURES)
    world.train()
    leader = world.leader
    assert leader.agent._leader is not None
    here = next(rank for rank in (0, 1) if world.holder(rank) is leader)
    there = 1 - here
    early = Up(2, there, [msgspec.Raw(encode(Gather("barrier", 0)))])
    leader.agent._leader.hear(FromAgent(world.holder(there).me, early), world.clock.now())
    world.fail(there)
    world.until(lambda: world.training and world.view.round and world.view.round.number == 2)
    world.say(here, Gather("barrier", 0))
    world.settle()
    assert world.heard(there, Gathered)
    assert world.heard(here, Gathered)
