"""Chaos plans are determined by their seed; late kills are repeated earlier and counted."""

from pathlib import Path

import pytest

from spotfit.core.codec import decoder, encode
from spotfit_localsim.live import network_faults
from spotfit_localsim.live.chaos import (
    ChaosPlan,
    ChaosRunner,
    PlannedKill,
    random_plan,
    random_save_plan,
)
from spotfit_localsim.live.chaos_runs import ChaosOutcome, LiveChaosSummary
from spotfit_localsim.live.crash_points import CRASH_POINTS


def test_same_seed_gives_the_same_result() -> None:
    assert random_plan(7) == random_plan(7)
    assert decoder(ChaosPlan).decode(encode(random_plan(7))) == random_plan(7)


def test_seeds_cover_all_faults() -> None:
    plans = [random_plan(seed, torch_fraction=0.5) for seed in range(200)]
    assert {plan.job for plan in plans} == {"hash_chain", "gradient_descent"}
    assert {plan.store for plan in plans} == {"file", "s3"}
    targets = {kill.target for plan in plans for kill in plan.kills}
    assert targets == {"worker", "agent", "leader", "node", "fork_server", "driver"}
    assert {len(plan.kills) for plan in plans} == {1, 2, 3, 4}
    assert any(plan.network_faults.lost_response_probability > 0 for plan in plans)
    assert any(plan.network_faults.stall_probability > 0 for plan in plans)
    stalls = [plan.stall for plan in plans if plan.stall]
    assert 5 < len(stalls) < 60
    assert all(5.0 <= stall.duration_s <= 30.0 for stall in stalls)


def test_half_of_the_seeds_with_s3_have_other_answers_and_damaged_reads() -> None:
    for plan_for in (random_plan, random_save_plan):
        faults = [one.network_faults for one in map(plan_for, range(200)) if one.store == "s3"]
        with_answers = [one for one in faults if one.throttled_probability > 0]
        assert 0.3 < len(with_answers) / len(faults) < 0.7
        for probability in ("conflict", "late_conflict", "denied", "flipped", "truncated"):
            drawn = {getattr(one, f"{probability}_probability") for one in with_answers}
            assert len(drawn) == 3


def test_local_store_has_no_network_faults() -> None:
    plans = [random_plan(seed) for seed in range(50)]
    assert all(
        plan.network_faults.refusal_probability == 0 for plan in plans if plan.store == "file"
    )
    assert all(plan.stall is None for plan in plans if plan.store == "file")


def test_last_step_is_saved() -> None:
    """A repeated call then has no steps left to train after a lost end of the run."""
    assert all(plan.steps % plan.save_every == 0 for plan in map(random_plan, range(20)))


def test_save_plans_cover_all_crash_points() -> None:
    plans = [random_save_plan(seed, torch_fraction=0.5) for seed in range(300)]
    assert random_save_plan(7) == random_save_plan(7)
    assert decoder(ChaosPlan).decode(encode(plans[7])) == plans[7]
    assert {plan.job for plan in plans} == {"snapshots", "checkpointer"}
    assert {crash.crash_point for plan in plans for crash in plan.injected_crashes} == set(
        CRASH_POINTS
    )
    assert {crash.effect for plan in plans for crash in plan.injected_crashes} == {
        "kill",
        "disk_full",
    }
    targets = {kill.target for plan in plans for kill in plan.kills}
    assert targets == {"worker", "agent", "node", "all_machines", "uploader", "driver"}
    assert {plan.corruption.kind for plan in plans if plan.corruption} == {
        "flip",
        "cut",
        "delete",
    }
    assert all(plan.steps % plan.save_every == 0 for plan in plans)


# --- kills that come too late --------------------------------------------------------------------

TWO_KILLS = ChaosPlan(
    7,
    "hash_chain",
    "file",
    network_faults.no_faults(),
    (PlannedKill(1.0, "worker"), PlannedKill(3.0, "driver")),
    step_s=0.0,
)


def make_outcome(effective: int, *wrong: str) -> ChaosOutcome:
    return ChaosOutcome([], list(wrong), effective, late_kills=2 - effective, duration_s=2.0)


def record_runs(monkeypatch: pytest.MonkeyPatch, *outcomes: ChaosOutcome) -> list[ChaosPlan]:
    """Replace runs by these outcomes; returns the list to which each started plan is added."""
    started: list[ChaosPlan] = []

    def run_once(_: ChaosRunner, plan: ChaosPlan, _network: str, _expected: str) -> ChaosOutcome:
        started.append(plan)
        return outcomes[len(started) - 1]

    monkeypatch.setattr(ChaosRunner, "_run_once", run_once)
    return started


def test_run_with_late_kills_is_repeated_with_earlier_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = record_runs(monkeypatch, make_outcome(1), make_outcome(1), make_outcome(0))
    outcome = ChaosRunner(tmp_path, timeout_s=1.0).run_plan(TWO_KILLS, "")
    assert [plan.replay for plan in started] == [0, 1, 2], "at most three times"
    first, second, _ = ([kill.at_s for kill in plan.kills] for plan in started)
    assert first == [1.0, 3.0]
    assert second == pytest.approx([0.4, 1.2])
    assert len({plan.name for plan in started}) == 3, "each attempt is a separate run"
    assert (outcome.effective_kills, outcome.late_kills) == (0, 2)


@pytest.mark.parametrize("outcome", [make_outcome(2), make_outcome(1, "a step was lost")])
def test_effective_or_failed_run_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: ChaosOutcome
) -> None:
    started = record_runs(monkeypatch, outcome)
    assert ChaosRunner(tmp_path, timeout_s=1.0).run_plan(TWO_KILLS, "") == outcome
    assert len(started) == 1


def test_kills_are_never_moved_later() -> None:
    assert TWO_KILLS.with_earlier_kills(100.0).kills == TWO_KILLS.kills
    at_once = ChaosPlan(
        7, "hash_chain", "file", network_faults.no_faults(), (PlannedKill(0.0, "driver"),)
    )
    assert at_once.with_earlier_kills(1.0).kills == at_once.kills


def test_late_kills_are_counted_separately() -> None:
    summary = LiveChaosSummary()
    for outcome in (make_outcome(2), make_outcome(1), make_outcome(1, "a step was lost")):
        summary.add(outcome)
    assert (
        summary.run_count,
        summary.failed_runs,
        summary.effective_kills,
        summary.late_kills,
    ) == (
        3,
        1,
        4,
        2,
    )
    assert str(summary) == "3 runs, 1 failed; 4 kills effective, 2 too late"
