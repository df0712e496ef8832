"""The production code in worlds that go wrong: whatever happens, what must hold does hold."""

from dataclasses import replace

import pytest

from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    FitStarted,
    LeaderElected,
    RoundClosed,
    RoundOpened,
)
from spotfit_localsim.virtual.scenario import AtStep, BucketStall, Scenario
from spotfit_localsim.virtual.scenario_library import (
    LONG_WORKLOAD,
    SCENARIOS,
    all_machines_reclaimed_without_driver,
    budget_exhausted,
    checkpoint_retention,
    deposed_leader,
    elastic_shrink_grow,
    hanging_rank,
    laptop_dies,
    plain,
    preemption_with_notice,
    random_save_scenario,
    random_scenario,
    uploads_outlive_workers,
    worker_crashes_within_budget,
)
from spotfit_localsim.virtual.simulation import SimDesign, simulate


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_invariants_hold_in_named_scenarios(scenario: Scenario, seeds: range) -> None:
    for seed in seeds:
        simulate(scenario, seed)


def test_invariants_hold_in_random_scenarios(seeds: range) -> None:
    for seed in range(len(seeds) * 5):
        simulate(random_scenario(seed), seed)


def test_invariants_hold_in_random_save_scenarios(seeds: range) -> None:
    stories = [simulate(random_save_scenario(seed), seed) for seed in range(len(seeds) * 3)]
    assert any(story.rounds_from_memory for story in stories)


def test_preempted_machine_leaves_when_a_peer_has_its_snapshot() -> None:
    """Though its upload takes far longer."""
    load = replace(
        preemption_with_notice.workload,
        uses_snapshots=True,
        save_every=2,
        upload_s=(4.0, 5.0),
        replication_s=(0.05, 0.2),
    )
    story = simulate(replace(preemption_with_notice, workload=load), 0)
    closed = [one.event for one in story.entries if isinstance(one.event, RoundClosed)]
    assert closed
    assert all(one.state_replicated for one in closed)
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
def test_regression_seeds_pass(seed: int, found: str) -> None:
    assert simulate(random_scenario(seed), seed).violation is None, found


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (9100614, "a connection broke, was made anew, and a snapshot lacked the part lost with it"),
    ],
)
def test_regression_seeds_of_saves_pass(seed: int, found: str) -> None:
    assert simulate(random_save_scenario(seed), seed).violation is None, found


def test_same_seed_gives_the_same_result() -> None:
    first, again = (simulate(random_scenario(5), 5) for _ in range(2))
    assert str(first) == str(again)
    assert first.requests == again.requests
    assert str(first) != str(simulate(random_scenario(6), 6))


def test_every_fit_ends_once(seeds: range) -> None:
    for seed in seeds:
        events = [entry.event for entry in simulate(random_scenario(seed), seed).entries]
        assert sum(isinstance(event, FitStarted) for event in events) == 1
        assert sum(isinstance(event, FitEnded) for event in events) == 1


def test_frozen_leader_is_deposed_and_appends_nothing(seeds: range) -> None:
    for seed in seeds:
        story = simulate(deposed_leader, seed)
        leader = None
        for entry in story.entries:
            if isinstance(entry.event, LeaderElected):
                leader = entry.event.leader
            elif not isinstance(entry.event, FitStarted):
                assert entry.author == leader
        assert story.elections >= 3


def test_bucket_stall_of_30_s_ends_no_round_and_no_leadership(seeds: range) -> None:
    """Errands beside the ticks, as in production: agents go on hearing and greeting each other."""
    hangs = replace(plain, workload=LONG_WORKLOAD, events=(BucketStall(AtStep(10), 30.0),))
    for seed in seeds:
        story = simulate(hangs, seed, SimDesign(uses_background_calls=True))
        assert (story.rounds, story.elections) == (1, 2)
        assert story.steps_repeated == 0


def test_preemption_notice_repeats_few_steps(seeds: range) -> None:
    """Two notices; a step is done again only if it came after the last of the regular saves."""
    for seed in seeds:
        repeated = simulate(preemption_with_notice, seed).steps_repeated
        assert repeated <= 2 * preemption_with_notice.workload.save_every


def test_sweep_resumes_the_run_without_laptop_and_machines(seeds: range) -> None:
    for seed in seeds:
        story = simulate(all_machines_reclaimed_without_driver, seed)
        revived = [entry for entry in story.entries if str(entry.author).startswith("sweep")]
        assert story.outcome == "finished"
        assert revived, "nobody but a sweep could have asked for machines"


def test_run_finishes_without_the_laptop(seeds: range) -> None:
    for seed in seeds:
        assert simulate(laptop_dies, seed).outcome == "finished"


def test_worker_failure_counts_once_and_lost_machine_never(seeds: range) -> None:
    for seed in seeds:
        story = simulate(worker_crashes_within_budget, seed)
        assert story.view.failure_counts.get(FailureCause.WORKER, 0) == 3


def test_hanging_rank_is_detected_and_its_stacks_are_stored(seeds: range) -> None:
    for seed in seeds:
        story = simulate(hanging_rank, seed)
        closed = [one.event for one in story.entries if isinstance(one.event, RoundClosed)]
        hung = [event.failures for event in closed if event.cause is FailureCause.WORKER]
        assert [[(one.rank, one.kind) for one in failures] for failures in hung] == [
            [(1, "timeout")],
            [(3, "timeout")],
        ]


def test_exhausted_retry_budget_fails_the_run(seeds: range) -> None:
    for seed in seeds:
        ended = simulate(budget_exhausted, seed).view.fit_end
        assert ended is not None
        assert ended.cause is FailureCause.WORKER
        assert "limit 1" in ended.reason


def test_uploads_survive_the_death_of_their_worker(seeds: range) -> None:
    """It dies a step after each report, long before the upload is done: only that step is lost."""
    for seed in seeds:
        assert simulate(uploads_outlive_workers, seed).steps_repeated <= 3


def test_elastic_group_shrinks_and_grows(seeds: range) -> None:
    sizes = set()
    for seed in seeds:
        for entry in simulate(elastic_shrink_grow, seed).entries:
            if isinstance(entry.event, RoundOpened):
                sizes.add(entry.event.round.world_size)
    assert min(sizes) < 8
    assert max(sizes) == 8


def test_retention_keeps_the_configured_checkpoints(seeds: range) -> None:
    for seed in seeds:
        view = simulate(checkpoint_retention, seed).view
        assert len(view.checkpoints) <= 3


def test_incomplete_checkpoints_are_deleted_at_the_end(seeds: range) -> None:
    for seed in seeds:
        storm = random_scenario(seed)
        if storm.workload.checkpoint_naming == "generated":
            story = simulate(storm, seed)
            last = {commit.name for commit in story.view.checkpoints}
            assert len(story.top_level_folders - last) <= 1, (
                "what the last round was at when it ended"
            )


def test_no_step_is_committed_twice(seeds: range) -> None:
    for seed in range(len(seeds) * 3):
        entries = simulate(random_scenario(seed), seed).entries
        commits = [one.event for one in entries if isinstance(one.event, CheckpointCommitted)]
        steps = [commit.metrics["step"] for commit in commits]
        assert steps == sorted(set(steps))


def test_rounds_have_distinct_numbers_and_never_overlap(seeds: range) -> None:
    for seed in seeds:
        numbers, is_open = [], False
        for entry in simulate(random_scenario(seed), seed).entries:
            if isinstance(entry.event, RoundOpened):
                assert not is_open
                numbers.append(entry.event.round.number)
                is_open = True
            elif isinstance(entry.event, RoundClosed | FitEnded):
                is_open = False
        assert numbers == sorted(set(numbers))
