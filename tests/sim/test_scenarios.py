"""The production code in worlds that go wrong: whatever happens, what must hold does hold."""

from dataclasses import replace

import pytest

from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    FitEnded,
    FitStarted,
    LeaderElected,
    RoundClosed,
    RoundOpened,
)
from spotfit_localsim.library import (
    LIBRARY,
    LONG,
    a_rank_hangs,
    budget_exhausted,
    deposed_leader,
    elastic_shrink_grow,
    everybody_reclaimed_unseen,
    few_are_kept,
    laptop_dies,
    plain,
    preemption_with_notice,
    random_saves,
    random_storm,
    uploads_outlive_workers,
    worker_crashes_within_budget,
)
from spotfit_localsim.run import Design, simulate
from spotfit_localsim.scenario import Scenario, Stall, Step


@pytest.mark.parametrize("scenario", LIBRARY, ids=lambda scenario: scenario.name)
def test_all_that_must_hold_holds_in(scenario: Scenario, seeds: range) -> None:
    for seed in seeds:
        simulate(scenario, seed)


def test_all_that_must_hold_holds_in_random_storms(seeds: range) -> None:
    for seed in range(len(seeds) * 5):
        simulate(random_storm(seed), seed)


def test_all_that_must_hold_holds_where_ranks_save_into_memory(seeds: range) -> None:
    stories = [simulate(random_saves(seed), seed) for seed in range(len(seeds) * 3)]
    assert any(story.rounds_from_memory for story in stories)


def test_a_machine_is_left_once_a_neighbour_has_what_it_saved() -> None:
    """Though its upload takes far longer."""
    load = replace(
        preemption_with_notice.load,
        snapshots=True,
        save_every=2,
        save_s=(4.0, 5.0),
        copy_s=(0.05, 0.2),
    )
    story = simulate(replace(preemption_with_notice, load=load), 0)
    closed = [one.event for one in story.entries if isinstance(one.event, RoundClosed)]
    assert closed
    assert all(one.safe for one in closed)
    assert story.rounds_from_memory == len(closed)
    assert story.steps_repeated <= 2 * len(closed), "what was trained on while it was copied"


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (110, "a checkpoint of an abandoned round was adopted after the next one had begun"),
        (41146, "all but the leader had left a round before the leader read that it had opened it"),
        (104733, "a refusal was written but not read back, and the request was sent once more"),
        (202222, "a refusal was written but not read back, and the request was sent once more"),
        (303276, "a deposed leader's late request brought a machine that nobody let go"),
        (5012248, "a verdict told again, of an earlier validation, hid the one that was awaited"),
        (8000459, "to delete one checkpoint took reading all manifests, which never all succeeded"),
        (501145, "a member came back after its round was given up, and was not told"),
    ],
)
def test_a_storm_that_once_broke_something_does_so_no_more(seed: int, found: str) -> None:
    assert simulate(random_storm(seed), seed).broken is None, found


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (9100614, "a connection broke, was made anew, and a snapshot lacked the part lost with it"),
    ],
)
def test_saves_that_once_went_wrong_do_so_no_more(seed: int, found: str) -> None:
    assert simulate(random_saves(seed), seed).broken is None, found


def test_the_same_seed_tells_the_same_story() -> None:
    first, again = (simulate(random_storm(5), 5) for _ in range(2))
    assert str(first) == str(again)
    assert first.requests == again.requests
    assert str(first) != str(simulate(random_storm(6), 6))


def test_every_fit_ends_once(seeds: range) -> None:
    for seed in seeds:
        events = [entry.event for entry in simulate(random_storm(seed), seed).entries]
        assert sum(isinstance(event, FitStarted) for event in events) == 1
        assert sum(isinstance(event, FitEnded) for event in events) == 1


def test_a_leader_that_slept_finds_itself_deposed_and_decides_nothing(seeds: range) -> None:
    for seed in seeds:
        story = simulate(deposed_leader, seed)
        leader = None
        for entry in story.entries:
            if isinstance(entry.event, LeaderElected):
                leader = entry.event.leader
            elif not isinstance(entry.event, FitStarted):
                assert entry.by == leader
        assert story.elections >= 3


def test_a_bucket_that_hangs_for_half_a_minute_costs_no_round_and_no_lead(seeds: range) -> None:
    """Errands beside the ticks, as in production: agents go on hearing and greeting each other."""
    hangs = replace(plain, load=LONG, acts=(Stall(Step(10), 30.0),))
    for seed in seeds:
        story = simulate(hangs, seed, Design(beside=True))
        assert (story.rounds, story.elections) == (1, 2)
        assert story.steps_repeated == 0


def test_a_notice_costs_a_round_but_hardly_a_step(seeds: range) -> None:
    """Two notices; a step is done again only if it came after the last of the regular saves."""
    for seed in seeds:
        repeated = simulate(preemption_with_notice, seed).steps_repeated
        assert repeated <= 2 * preemption_with_notice.load.save_every


def test_without_laptop_and_machines_a_sweep_goes_on_where_the_run_stood(seeds: range) -> None:
    for seed in seeds:
        story = simulate(everybody_reclaimed_unseen, seed)
        revived = [entry for entry in story.entries if str(entry.by).startswith("sweep")]
        assert story.outcome == "finished"
        assert revived, "nobody but a sweep could have asked for machines"


def test_the_run_does_not_need_the_laptop_that_began_it(seeds: range) -> None:
    for seed in seeds:
        assert simulate(laptop_dies, seed).outcome == "finished"


def test_a_mistake_of_the_user_counts_once_and_a_lost_machine_never(seeds: range) -> None:
    for seed in seeds:
        story = simulate(worker_crashes_within_budget, seed)
        assert story.view.failures.get(Blame.WORKER, 0) == 3


def test_a_rank_that_hangs_is_found_and_its_stacks_are_kept(seeds: range) -> None:
    for seed in seeds:
        story = simulate(a_rank_hangs, seed)
        closed = [one.event for one in story.entries if isinstance(one.event, RoundClosed)]
        hung = [event.failures for event in closed if event.blame is Blame.WORKER]
        assert [[(one.rank, one.kind) for one in failures] for failures in hung] == [
            [(1, "timeout")],
            [(3, "timeout")],
        ]


def test_a_spent_budget_ends_the_run_and_says_so(seeds: range) -> None:
    for seed in seeds:
        ended = simulate(budget_exhausted, seed).view.ended
        assert ended is not None
        assert ended.blame is Blame.WORKER
        assert "1 allowed" in ended.why


def test_what_a_dying_worker_gave_away_is_not_lost(seeds: range) -> None:
    """It dies a step after each report, long before the upload is done: only that step is lost."""
    for seed in seeds:
        assert simulate(uploads_outlive_workers, seed).steps_repeated <= 3


def test_an_elastic_group_shrinks_and_grows(seeds: range) -> None:
    sizes = set()
    for seed in seeds:
        for entry in simulate(elastic_shrink_grow, seed).entries:
            if isinstance(entry.event, RoundOpened):
                sizes.add(entry.event.round.world_size)
    assert min(sizes) < 8
    assert max(sizes) == 8


def test_only_those_checkpoints_stay_that_are_to_stay(seeds: range) -> None:
    for seed in seeds:
        view = simulate(few_are_kept, seed).view
        assert len(view.checkpoints) <= 3


def test_what_rounds_before_the_last_left_half_saved_is_gone_at_the_end(seeds: range) -> None:
    for seed in seeds:
        storm = random_storm(seed)
        if storm.load.names == "made":
            story = simulate(storm, seed)
            last = {commit.name for commit in story.view.checkpoints}
            assert len(story.folders - last) <= 1, "what the last round was at when it ended"


def test_no_step_is_committed_twice(seeds: range) -> None:
    for seed in range(len(seeds) * 3):
        entries = simulate(random_storm(seed), seed).entries
        commits = [one.event for one in entries if isinstance(one.event, CheckpointCommitted)]
        steps = [commit.metrics["step"] for commit in commits]
        assert steps == sorted(set(steps))


def test_rounds_have_distinct_numbers_and_never_overlap(seeds: range) -> None:
    for seed in seeds:
        numbers, is_open = [], False
        for entry in simulate(random_storm(seed), seed).entries:
            if isinstance(entry.event, RoundOpened):
                assert not is_open
                numbers.append(entry.event.round.number)
                is_open = True
            elif isinstance(entry.event, RoundClosed | FitEnded):
                is_open = False
        assert numbers == sorted(set(numbers))
