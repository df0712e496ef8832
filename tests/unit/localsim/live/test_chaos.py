"""A seed is a story: the same one every time, and each its own."""

from pathlib import Path

import pytest

from spotfit.core.codec import decoder, encode
from spotfit_localsim.live import bad_wire
from spotfit_localsim.live.chaos import (
    Blow,
    Ending,
    Story,
    Tally,
    Theatre,
    story_of,
    story_of_saves,
)
from spotfit_localsim.live.mines import MOMENTS


def test_the_same_seed_tells_the_same_story() -> None:
    assert story_of(7) == story_of(7)
    assert decoder(Story).decode(encode(story_of(7))) == story_of(7)


def test_seeds_tell_of_everything_that_can_happen() -> None:
    stories = [story_of(seed, torch=0.5) for seed in range(200)]
    assert {story.job for story in stories} == {"count", "descend"}
    assert {story.store for story in stories} == {"file", "s3"}
    struck = {blow.whom for story in stories for blow in story.blows}
    assert struck == {"worker", "agent", "leader", "node", "zygote", "driver"}
    assert {len(story.blows) for story in stories} == {1, 2, 3, 4}
    assert any(story.weather.unanswered > 0 for story in stories)
    assert any(story.weather.stalled > 0 for story in stories)
    stalls = [story.stall for story in stories if story.stall]
    assert 5 < len(stalls) < 60
    assert all(5.0 <= stall.for_s <= 30.0 for stall in stalls)


def test_on_a_disk_the_weather_is_fair() -> None:
    stories = [story_of(seed) for seed in range(50)]
    assert all(story.weather.refused == 0 for story in stories if story.store == "file")
    assert all(story.stall is None for story in stories if story.store == "file")


def test_the_last_step_is_saved() -> None:
    """Else a run that ended unheard would be trained on when it is called again."""
    assert all(story.steps % story.save_every == 0 for story in map(story_of, range(20)))


def test_stories_of_saves_tell_of_every_moment_of_a_save() -> None:
    stories = [story_of_saves(seed, torch=0.5) for seed in range(300)]
    assert story_of_saves(7) == story_of_saves(7)
    assert decoder(Story).decode(encode(stories[7])) == stories[7]
    assert {story.job for story in stories} == {"keep", "learn"}
    assert {mine.moment for story in stories for mine in story.mines} == set(MOMENTS)
    assert {mine.how for story in stories for mine in story.mines} == {"dies", "is full"}
    struck = {blow.whom for story in stories for blow in story.blows}
    assert struck == {"worker", "agent", "node", "everybody", "carrier", "driver"}
    assert {story.harm.how for story in stories if story.harm} == {"flip", "cut", "delete"}
    assert all(story.steps % story.save_every == 0 for story in stories)


# --- blows that come too late --------------------------------------------------------------------

TWO_BLOWS = Story(
    7, "count", "file", bad_wire.fair(), (Blow(1.0, "worker"), Blow(3.0, "driver")), pace_s=0.0
)


def an_ending(landed: int, *wrong: str) -> Ending:
    return Ending([], list(wrong), landed, late=2 - landed, lasted_s=2.0)


def playing(monkeypatch: pytest.MonkeyPatch, *endings: Ending) -> list[Story]:
    """The stories that a theatre is about to play, whose takes end like that."""
    played: list[Story] = []

    def take(_: Theatre, story: Story, _wire: str, _expected: str) -> Ending:
        played.append(story)
        return endings[len(played) - 1]

    monkeypatch.setattr(Theatre, "_take", take)
    return played


def test_a_story_that_ended_before_its_blows_is_played_again_with_sooner_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = playing(monkeypatch, an_ending(1), an_ending(1), an_ending(0))
    ending = Theatre(tmp_path, within_s=1.0).play(TWO_BLOWS, "")
    assert [story.take for story in played] == [0, 1, 2], "but not for ever"
    first, second, _ = ([blow.at_s for blow in story.blows] for story in played)
    assert first == [1.0, 3.0]
    assert second == pytest.approx([0.4, 1.2])
    assert len({story.name for story in played}) == 3, "each is a run of its own"
    assert (ending.landed, ending.late) == (0, 2)


@pytest.mark.parametrize("ending", [an_ending(2), an_ending(1, "a step was lost")])
def test_one_that_landed_or_went_wrong_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending
) -> None:
    played = playing(monkeypatch, ending)
    assert Theatre(tmp_path, within_s=1.0).play(TWO_BLOWS, "") == ending
    assert len(played) == 1


def test_blows_are_only_ever_moved_to_earlier() -> None:
    assert TWO_BLOWS.sooner(100.0).blows == TWO_BLOWS.blows
    at_once = Story(7, "count", "file", bad_wire.fair(), (Blow(0.0, "driver"),))
    assert at_once.sooner(1.0).blows == at_once.blows


def test_late_blows_are_counted_apart() -> None:
    tally = Tally()
    for ending in (an_ending(2), an_ending(1), an_ending(1, "a step was lost")):
        tally.add(ending)
    assert (tally.stories, tally.wrong, tally.landed, tally.late) == (3, 1, 4, 2)
    assert str(tally) == "3 stories, 1 wrong; 4 blows landed, 2 came too late"
