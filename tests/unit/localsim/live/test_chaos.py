"""A seed is a story: the same one every time, and each its own."""

from pathlib import Path

import pytest

from spotfit.core.codec import decoder, encode
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos import (
    ChaosOutcome,
    ChaosPlan,
    ChaosRunner,
    LiveChaosSummary,
    PlannedKill,
    random_plan,
    random_save_plan,
)
from spotfit_localsim.live.crash_points import CRASH_POINTS


def test_same_seed_gives_the_same_result() -> None:
    assert random_plan(7) == random_plan(7)
    assert decoder(ChaosPlan).decode(encode(random_plan(7))) == random_plan(7)


def test_seeds_cover_all_faults() -> None:
    stories = [random_plan(seed, torch_fraction=0.5) for seed in range(200)]
    assert {story.job for story in stories} == {"hash_chain", "gradient_descent"}
    assert {story.store for story in stories} == {"file", "s3"}
    struck = {blow.target for story in stories for blow in story.kills}
    assert struck == {"worker", "agent", "leader", "node", "fork_server", "driver"}
    assert {len(story.kills) for story in stories} == {1, 2, 3, 4}
    assert any(story.network_faults.lost_response_probability > 0 for story in stories)
    assert any(story.network_faults.stall_probability > 0 for story in stories)
    stalls = [story.stall for story in stories if story.stall]
    assert 5 < len(stalls) < 60
    assert all(5.0 <= stall.duration_s <= 30.0 for stall in stalls)


def test_local_store_has_no_network_faults() -> None:
    stories = [random_plan(seed) for seed in range(50)]
    assert all(
        story.network_faults.refusal_probability == 0 for story in stories if story.store == "file"
    )
    assert all(story.stall is None for story in stories if story.store == "file")


def test_last_step_is_saved() -> None:
    """Else a run that ended unheard would be trained on when it is called again."""
    assert all(story.steps % story.save_every == 0 for story in map(random_plan, range(20)))


def test_save_plans_cover_all_crash_points() -> None:
    stories = [random_save_plan(seed, torch_fraction=0.5) for seed in range(300)]
    assert random_save_plan(7) == random_save_plan(7)
    assert decoder(ChaosPlan).decode(encode(stories[7])) == stories[7]
    assert {story.job for story in stories} == {"snapshots", "checkpointer"}
    assert {mine.crash_point for story in stories for mine in story.injected_crashes} == set(
        CRASH_POINTS
    )
    assert {mine.effect for story in stories for mine in story.injected_crashes} == {
        "kill",
        "disk_full",
    }
    struck = {blow.target for story in stories for blow in story.kills}
    assert struck == {"worker", "agent", "node", "all_machines", "uploader", "driver"}
    assert {story.corruption.kind for story in stories if story.corruption} == {
        "flip",
        "cut",
        "delete",
    }
    assert all(story.steps % story.save_every == 0 for story in stories)


# --- blows that come too late --------------------------------------------------------------------

TWO_BLOWS = ChaosPlan(
    7,
    "hash_chain",
    "file",
    network_faults.no_faults(),
    (PlannedKill(1.0, "worker"), PlannedKill(3.0, "driver")),
    step_s=0.0,
)


def an_ending(landed: int, *wrong: str) -> ChaosOutcome:
    return ChaosOutcome([], list(wrong), landed, late_kills=2 - landed, duration_s=2.0)


def playing(monkeypatch: pytest.MonkeyPatch, *endings: ChaosOutcome) -> list[ChaosPlan]:
    """The stories that a theatre is about to play, whose takes end like that."""
    played: list[ChaosPlan] = []

    def take(_: ChaosRunner, story: ChaosPlan, _wire: str, _expected: str) -> ChaosOutcome:
        played.append(story)
        return endings[len(played) - 1]

    monkeypatch.setattr(ChaosRunner, "_run_once", take)
    return played


def test_run_with_late_kills_is_repeated_with_earlier_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = playing(monkeypatch, an_ending(1), an_ending(1), an_ending(0))
    ending = ChaosRunner(tmp_path, timeout_s=1.0).run_plan(TWO_BLOWS, "")
    assert [story.replay for story in played] == [0, 1, 2], "at most three times"
    first, second, _ = ([blow.at_s for blow in story.kills] for story in played)
    assert first == [1.0, 3.0]
    assert second == pytest.approx([0.4, 1.2])
    assert len({story.name for story in played}) == 3, "each is a run of its own"
    assert (ending.effective_kills, ending.late_kills) == (0, 2)


@pytest.mark.parametrize("ending", [an_ending(2), an_ending(1, "a step was lost")])
def test_effective_or_failed_run_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: ChaosOutcome
) -> None:
    played = playing(monkeypatch, ending)
    assert ChaosRunner(tmp_path, timeout_s=1.0).run_plan(TWO_BLOWS, "") == ending
    assert len(played) == 1


def test_kills_are_never_moved_later() -> None:
    assert TWO_BLOWS.with_earlier_kills(100.0).kills == TWO_BLOWS.kills
    at_once = ChaosPlan(
        7, "hash_chain", "file", network_faults.no_faults(), (PlannedKill(0.0, "driver"),)
    )
    assert at_once.with_earlier_kills(1.0).kills == at_once.kills


def test_late_kills_are_counted_separately() -> None:
    tally = LiveChaosSummary()
    for ending in (an_ending(2), an_ending(1), an_ending(1, "a step was lost")):
        tally.add(ending)
    assert (tally.run_count, tally.failed_runs, tally.effective_kills, tally.late_kills) == (
        3,
        1,
        4,
        2,
    )
    assert str(tally) == "3 runs, 1 failed; 4 kills effective, 2 too late"
