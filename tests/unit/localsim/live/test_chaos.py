"""A seed is a story: the same one every time, and each its own."""

from spotfit.core.codec import decoder, encode
from spotfit_localsim.live.chaos import Story, story_of


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


def test_on_a_disk_the_weather_is_fair() -> None:
    stories = [story_of(seed) for seed in range(50)]
    assert all(story.weather.refused == 0 for story in stories if story.store == "file")


def test_the_last_step_is_saved() -> None:
    """Else a run that ended unheard would be trained on when it is called again."""
    assert all(story.steps % story.save_every == 0 for story in map(story_of, range(20)))
