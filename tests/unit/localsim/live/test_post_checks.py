"""Every kind of violation in a finished run is detected by its check."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.host import memory
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    GroupPlanned,
    JournalEvent,
    NodeLost,
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


def planned_group(token: str) -> GroupPlanned:
    return GroupPlanned(
        request=GroupRequest(token=Token(token), num_workers=2, total_workers=2),
        plan=GroupPlan(token=Token(token), provisioner="local", num_nodes=1, slots_per_node=2),
    )


FINISHED = FitEnded(outcome="finished", metrics={"step": STEPS, "steps": STEPS})
GOOD_EVENTS: tuple[JournalEvent, ...] = (
    planned_group("a"),
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
    put_report(store, "a", 0)
    return store


def put_report(store: Store, agent: str, index: int, step: int = 1) -> None:
    """Store a report of round 1 as a chunk of its own."""
    metrics = {"step": step, "steps": step}
    line = {"round": 1, "report_index": index, "checkpoint": None, "metrics": metrics}
    store.put(keys.reports(AgentId(agent), index), json.dumps(line).encode())


def put_log(store: Store, agent: str, chunk: int, *steps: int, end: bool = False) -> None:
    lines = [{"rank": 0, "round": 2, "text": f"step {step}"} for step in steps]
    body = [json.dumps(line) for line in (*lines, *([{"end": True}] if end else []))]
    store.put(keys.logs(AgentId(agent), chunk), "\n".join(body).encode())


def audit(store: Store, *events: JournalEvent, **observed: object) -> list[str]:
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    for event in events:
        ledger.append(event, after=ledger.catch_up())
    defaults: dict[str, object] = {"result": "right", "machine_starts": ["a 0 17"], "leftovers": []}
    return RunAudit.read(url=store.url, **defaults | observed).find_violations("right", steps=STEPS)  # type: ignore[arg-type]  # the fields vary


def test_good_run_has_no_violations(store: Store) -> None:
    assert audit(store, *GOOD_EVENTS) == []


def test_skipped_checkpoint_is_a_violation(store: Store) -> None:
    (violation,) = audit(
        store,
        *GOOD_EVENTS[:3],
        RoundOpened(round=Round(number=2, assignments=())),
        *GOOD_EVENTS[4:],
    )
    assert "starts from None, but one was committed" in violation


def test_checkpoint_without_files_is_a_violation(store: Store) -> None:
    store.delete("two/rank-1")
    (violation,) = audit(store, *GOOD_EVENTS)
    assert "checkpoint two has no files of ranks [1]" in violation


def test_repeated_step_count_is_a_violation(store: Store) -> None:
    (violation,) = audit(store, *GOOD_EVENTS[:4], committed("two", STEPS, STEPS + 1), FINISHED)
    assert "counts a step twice" in violation


def test_machine_started_twice_is_a_violation(store: Store) -> None:
    assert audit(store, *GOOD_EVENTS, machine_starts=["a 0 17", "a 0 18"]) == [
        "machine a/0 was started twice"
    ]


def test_unplanned_machine_is_a_violation(store: Store) -> None:
    (violation,) = audit(store, *GOOD_EVENTS, machine_starts=["b 0 17"])
    assert "not planned" in violation


def test_wrong_result_is_a_violation(store: Store) -> None:
    (violation,) = audit(store, *GOOD_EVENTS, result="left")
    assert "the result is left" in violation


def test_unfinished_run_is_a_violation(store: Store) -> None:
    (violation,) = audit(store, *GOOD_EVENTS[:-1])
    assert "has not finished" in violation


def test_leftovers_are_violations(store: Store) -> None:
    assert audit(store, *GOOD_EVENTS, leftovers=["process 17"]) == ["leftover: process 17"]


def test_different_reports_of_one_number_are_a_violation(store: Store) -> None:
    put_report(store, "b", 0, step=2)
    assert audit(store, *GOOD_EVENTS) == ["report (1, 0) was stored twice"]


def test_a_report_that_the_next_leader_has_stored_again_is_no_violation(store: Store) -> None:
    put_report(store, "b", 0)
    assert audit(store, *GOOD_EVENTS) == []


def test_a_report_that_a_leader_stored_twice_is_a_violation(store: Store) -> None:
    body = store.get(keys.reports(AgentId("a"), 0))
    store.put(keys.reports(AgentId("a"), 1), body)
    assert audit(store, *GOOD_EVENTS) == ["report (1, 0) was stored twice"]


def test_a_missing_report_before_a_commit_is_a_violation(store: Store) -> None:
    store.delete(keys.reports(AgentId("a"), 0))
    put_report(store, "a", 1)
    (violation,) = audit(store, *GOOD_EVENTS)
    assert violation == "reports [0] of round 1 are missing, but 0 was committed"


def test_a_complete_log_has_no_violations(store: Store) -> None:
    put_log(store, "a", 0, *range(1, 6))
    put_log(store, "a", 1, *range(6, STEPS + 1), end=True)
    assert audit(store, *GOOD_EVENTS) == []


def test_a_missing_chunk_of_a_log_is_a_violation(store: Store) -> None:
    put_log(store, "a", 1, *range(1, STEPS + 1), end=True)
    (violation,) = audit(store, *GOOD_EVENTS)
    assert "chunks of the log of a are missing" in violation


def test_a_lost_line_is_a_violation(store: Store) -> None:
    put_log(store, "a", 0, 1, 2, 4)
    (violation,) = audit(store, *GOOD_EVENTS)
    assert violation == "round 2: lines of rank 0 are missing: [1, 2, 4]"


def test_a_lost_last_line_is_a_violation(store: Store) -> None:
    put_log(store, "a", 0, *range(1, STEPS), end=True)
    (violation,) = audit(store, *GOOD_EVENTS)
    assert violation == f"the last line of rank 0 is of step {STEPS - 1} of {STEPS}"


def test_a_replaced_machine_without_the_end_of_its_log_is_a_violation(store: Store) -> None:
    put_log(store, "gone", 0, 1, 2)
    lost = NodeLost(token=Token("a"), node=0, agent=AgentId("gone"), reason="it was replaced")
    (violation,) = audit(store, *GOOD_EVENTS[:-1], lost, FINISHED)
    assert violation == "gone was replaced, and its last output is not stored"


def test_shared_memory_of_an_agent_is_a_leftover(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIR", tmp_path)
    store.put(keys.member(AgentId("a")), b"{}")
    folder = tmp_path / f"spotfit-{os.getuid()}-a"
    folder.mkdir()
    assert audit(store, *GOOD_EVENTS) == [f"leftover: {folder}"]


def test_unreadable_run_is_a_violation(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    store.put(keys.entry(0), b"no entry")
    assert any("cannot be read" in one for one in audit(store))


def test_a_run_is_active_until_its_end_is_written(store: Store) -> None:
    times = iter(range(1000, 9000, 1000))
    ledger = Ledger(store, RunId("run"), AgentId("a"), wall_ms=lambda: next(times))
    for event in GOOD_EVENTS:
        ledger.append(event, after=ledger.catch_up())
    audit = RunAudit.read(url=store.url, result="right", machine_starts=[], leftovers=[])
    assert audit.ended_ms == 1000 * len(GOOD_EVENTS)
    assert audit.was_active_at(audit.ended_ms - 1)
    assert not audit.was_active_at(audit.ended_ms)


# --- snapshots -----------------------------------------------------------------------------------


def events_with_snapshot(store: Store, tmp_path: Path) -> tuple[JournalEvent, ...]:
    upload_test_snapshot(store, tmp_path / "memory", "two", [b"a tensor"])
    last = replace(committed("two", STEPS), ranks=(0,), is_snapshot=True)
    return (*GOOD_EVENTS[:4], last, FINISHED)


def test_readable_snapshot_has_no_violations(store: Store, tmp_path: Path) -> None:
    assert audit(store, *events_with_snapshot(store, tmp_path)) == []


def test_corrupt_snapshot_is_a_violation(store: Store, tmp_path: Path) -> None:
    events = events_with_snapshot(store, tmp_path)
    (chunk,) = [one.key for one in store.list("two/chunks")]
    store.put(chunk, b"a fensor")
    (violation,) = audit(store, *events)
    assert "checkpoint two is lost" in violation
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    assert ledger.catch_up().fit_end is not None
    corrupted = RunAudit.read(
        url=store.url,
        result="right",
        machine_starts=["a 0 17"],
        leftovers=[],
        corrupted_checkpoints={"two"},
    )
    assert corrupted.find_violations("right", steps=STEPS) == [], "the corruption was injected"


def test_memory_older_than_the_latest_commit_is_a_violation(store: Store) -> None:
    outdated = RoundOpened(
        round=Round(
            number=2,
            assignments=(),
            checkpoint_name="one",
            memory_snapshot=SnapshotId(round=1, step=4),
        )
    )
    (violation,) = audit(store, *GOOD_EVENTS[:3], outdated, *GOOD_EVENTS[4:])
    assert "starts from step 4 in memory, but step 5 was committed" in violation
