"""The auditor is awake: each design known to be wrong is caught by the rule made for it."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    GroupPlanned,
    JournalEvent,
    RoundOpened,
)
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.topology import Round, SnapshotId
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit_localsim.live.post_checks import RunAudit
from tests.unit.checkpoint.snapshots import upload_test_snapshot

STEPS = 10


def committed(name: str, step: int, steps: int | None = None) -> CheckpointCommitted:
    metrics = {"step": step, "steps": step if steps is None else steps}
    return CheckpointCommitted(name=name, round=1, report_index=0, metrics=metrics, ranks=(0, 1))


def ordered(token: str) -> GroupPlanned:
    return GroupPlanned(
        request=GroupRequest(token=Token(token), num_workers=2, total_workers=2),
        plan=GroupPlan(token=Token(token), provisioner="local", num_nodes=1, slots_per_node=2),
    )


FINISHED = FitEnded(outcome="finished", metrics={"step": STEPS, "steps": STEPS})
GOOD: tuple[JournalEvent, ...] = (
    ordered("a"),
    RoundOpened(round=Round(number=1, assignments=())),
    committed("one", 5),
    RoundOpened(round=Round(number=2, assignments=(), checkpoint_name="one")),
    committed("two", STEPS),
    FINISHED,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "run")
    for name in ("one", "two"):
        for rank in (0, 1):
            store.put(f"{name}/rank-{rank}", b"state")
    return store


def audit(store: Store, *events: JournalEvent, **seen: object) -> list[str]:
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    for event in events:
        ledger.append(event, after=ledger.catch_up())
    told: dict[str, object] = {"result": "right", "machine_starts": ["a 0 17"], "leftovers": []}
    return RunAudit.read(url=store.url, **told | seen).find_violations("right", steps=STEPS)  # type: ignore[arg-type]  # as told


def test_good_run_has_no_violations(store: Store) -> None:
    assert audit(store, *GOOD) == []


def test_skipped_checkpoint_is_a_violation(store: Store) -> None:
    (wrong,) = audit(
        store, *GOOD[:3], RoundOpened(round=Round(number=2, assignments=())), *GOOD[4:]
    )
    assert "starts from None, but one was committed" in wrong


def test_checkpoint_without_files_is_a_violation(store: Store) -> None:
    store.delete("two/rank-1")
    (wrong,) = audit(store, *GOOD)
    assert "checkpoint two has no files of ranks [1]" in wrong


def test_repeated_step_count_is_a_violation(store: Store) -> None:
    (wrong,) = audit(store, *GOOD[:4], committed("two", STEPS, STEPS + 1), FINISHED)
    assert "counts a step twice" in wrong


def test_machine_started_twice_is_a_violation(store: Store) -> None:
    assert audit(store, *GOOD, machine_starts=["a 0 17", "a 0 18"]) == [
        "machine a/0 was started twice"
    ]


def test_unplanned_machine_is_a_violation(store: Store) -> None:
    (wrong,) = audit(store, *GOOD, machine_starts=["b 0 17"])
    assert "not planned" in wrong


def test_wrong_result_is_a_violation(store: Store) -> None:
    (wrong,) = audit(store, *GOOD, result="left")
    assert "the result is left" in wrong


def test_unfinished_run_is_a_violation(store: Store) -> None:
    (wrong,) = audit(store, *GOOD[:-1])
    assert "has not finished" in wrong


def test_leftovers_are_violations(store: Store) -> None:
    assert audit(store, *GOOD, leftovers=["process 17"]) == ["leftover: process 17"]


def test_duplicate_report_is_a_violation(store: Store) -> None:
    line = {"round": 1, "report_index": 0, "checkpoint": None, "metrics": {"step": 1, "steps": 1}}
    for agent in ("a", "b"):
        store.put(keys.reports(AgentId(agent), 0), json.dumps(line).encode())
    assert audit(store, *GOOD) == ["report (1, 0) was stored twice"]


def test_unreadable_run_is_a_violation(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    store.put(keys.entry(0), b"no entry")
    assert any("cannot be read" in one for one in audit(store))


def test_a_run_is_active_until_its_end_is_written(store: Store) -> None:
    times = iter(range(1000, 9000, 1000))
    ledger = Ledger(store, RunId("run"), AgentId("a"), wall_ms=lambda: next(times))
    for event in GOOD:
        ledger.append(event, after=ledger.catch_up())
    audit = RunAudit.read(url=store.url, result="right", machine_starts=[], leftovers=[])
    assert audit.ended_ms == 1000 * len(GOOD)
    assert audit.was_active_at(audit.ended_ms - 1)
    assert not audit.was_active_at(audit.ended_ms)


# --- snapshots -----------------------------------------------------------------------------------


def with_a_snapshot(store: Store, tmp_path: Path) -> tuple[JournalEvent, ...]:
    upload_test_snapshot(store, tmp_path / "memory", "two", [b"a tensor"])
    last = replace(committed("two", STEPS), ranks=(0,), is_snapshot=True)
    return (*GOOD[:4], last, FINISHED)


def test_readable_snapshot_has_no_violations(store: Store, tmp_path: Path) -> None:
    assert audit(store, *with_a_snapshot(store, tmp_path)) == []


def test_corrupt_snapshot_is_a_violation(store: Store, tmp_path: Path) -> None:
    events = with_a_snapshot(store, tmp_path)
    (chunk,) = [one.key for one in store.list("two/chunks")]
    store.put(chunk, b"a fensor")
    (wrong,) = audit(store, *events)
    assert "checkpoint two is lost" in wrong
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    assert ledger.catch_up().fit_end is not None
    harmed = RunAudit.read(
        url=store.url,
        result="right",
        machine_starts=["a 0 17"],
        leftovers=[],
        corrupted_checkpoints={"two"},
    )
    assert harmed.find_violations("right", steps=STEPS) == [], "on purpose"


def test_memory_older_than_the_latest_commit_is_a_violation(store: Store) -> None:
    behind = RoundOpened(
        round=Round(
            number=2,
            assignments=(),
            checkpoint_name="one",
            memory_snapshot=SnapshotId(round=1, step=4),
        )
    )
    (wrong,) = audit(store, *GOOD[:3], behind, *GOOD[4:])
    assert "starts from step 4 in memory, but step 5 was committed" in wrong
