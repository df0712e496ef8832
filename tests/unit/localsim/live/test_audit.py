"""The auditor is awake: each design known to be wrong is caught by the rule made for it."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import CheckpointCommitted, Event, FitEnded, Intended, RoundOpened
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.holding import State
from spotfit.model.world import Round
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit_localsim.live.audit import Audit
from tests.unit.checkpoint.snapshots import brought

STEPS = 10


def committed(name: str, step: int, steps: int | None = None) -> CheckpointCommitted:
    metrics = {"step": step, "steps": step if steps is None else steps}
    return CheckpointCommitted(name, 1, 0, metrics, (0, 1))


def ordered(token: str) -> Intended:
    return Intended(GroupRequest(Token(token), 2, 2), GroupPlan(Token(token), "local", 1, 2))


FINISHED = FitEnded("finished", metrics={"step": STEPS, "steps": STEPS})
GOOD: tuple[Event, ...] = (
    ordered("a"),
    RoundOpened(Round(1, ())),
    committed("one", 5),
    RoundOpened(Round(2, (), "one")),
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


def audit(store: Store, *events: Event, **seen: object) -> list[str]:
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    for event in events:
        ledger.append(event, after=ledger.catch_up())
    told: dict[str, object] = {"result": "right", "paid": ["a 0 17"], "left": []}
    return Audit.of(url=store.url, **told | seen).wrong("right", steps=STEPS)  # type: ignore[arg-type]  # as told


def test_a_run_that_went_well_is_not_suspected(store: Store) -> None:
    assert audit(store, *GOOD) == []


def test_a_checkpoint_that_was_passed_over_is_noticed(store: Store) -> None:
    (wrong,) = audit(store, *GOOD[:3], RoundOpened(Round(2, ())), *GOOD[4:])
    assert "starts from None, and one was committed" in wrong


def test_a_checkpoint_without_its_files_is_noticed(store: Store) -> None:
    store.delete("two/rank-1")
    (wrong,) = audit(store, *GOOD)
    assert "checkpoint two has no files of ranks [1]" in wrong


def test_a_step_that_counts_twice_is_noticed(store: Store) -> None:
    (wrong,) = audit(store, *GOOD[:4], committed("two", STEPS, STEPS + 1), FINISHED)
    assert "counts a step twice" in wrong


def test_a_machine_paid_twice_is_noticed(store: Store) -> None:
    assert audit(store, *GOOD, paid=["a 0 17", "a 0 18"]) == ["machine a/0 was paid twice"]


def test_a_machine_nobody_ordered_is_noticed(store: Store) -> None:
    (wrong,) = audit(store, *GOOD, paid=["b 0 17"])
    assert "nobody ordered" in wrong


def test_another_result_is_noticed(store: Store) -> None:
    (wrong,) = audit(store, *GOOD, result="left")
    assert "the result is left" in wrong


def test_a_run_that_did_not_finish_is_noticed(store: Store) -> None:
    (wrong,) = audit(store, *GOOD[:-1])
    assert "has not finished" in wrong


def test_what_was_left_behind_is_told(store: Store) -> None:
    assert audit(store, *GOOD, left=["process 17"]) == ["left behind: process 17"]


def test_a_report_told_twice_is_noticed(store: Store) -> None:
    line = {"round": 1, "n": 0, "checkpoint": None, "metrics": {"step": 1, "steps": 1}}
    for agent in ("a", "b"):
        store.put(keys.reports(AgentId(agent), 0), json.dumps(line).encode())
    assert audit(store, *GOOD) == ["report (1, 0) was told twice"]


def test_a_run_that_cannot_be_read_is_suspicious(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    store.put(keys.entry(0), b"no entry")
    assert any("cannot be read" in one for one in audit(store))


def test_a_run_is_active_until_its_end_is_written(store: Store) -> None:
    times = iter(range(1000, 9000, 1000))
    ledger = Ledger(store, RunId("run"), AgentId("a"), wall_ms=lambda: next(times))
    for event in GOOD:
        ledger.append(event, after=ledger.catch_up())
    audit = Audit.of(url=store.url, result="right", paid=[], left=[])
    assert audit.ended_ms == 1000 * len(GOOD)
    assert audit.active_at(audit.ended_ms - 1)
    assert not audit.active_at(audit.ended_ms)


# --- snapshots -----------------------------------------------------------------------------------


def with_a_snapshot(store: Store, tmp_path: Path) -> tuple[Event, ...]:
    brought(store, tmp_path / "memory", "two", [b"a tensor"])
    last = replace(committed("two", STEPS), ranks=(0,), snapshot=True)
    return (*GOOD[:4], last, FINISHED)


def test_a_snapshot_that_can_be_read_is_not_suspected(store: Store, tmp_path: Path) -> None:
    assert audit(store, *with_a_snapshot(store, tmp_path)) == []


def test_a_snapshot_of_which_a_byte_is_wrong_is_noticed(store: Store, tmp_path: Path) -> None:
    events = with_a_snapshot(store, tmp_path)
    (chunk,) = [one.key for one in store.list("two/chunks")]
    store.put(chunk, b"a fensor")
    (wrong,) = audit(store, *events)
    assert "checkpoint two is lost" in wrong
    ledger = Ledger(store, RunId("run"), AgentId("a"))
    assert ledger.catch_up().ended is not None
    harmed = Audit.of(url=store.url, result="right", paid=["a 0 17"], left=[], harmed={"two"})
    assert harmed.wrong("right", steps=STEPS) == [], "on purpose"


def test_memory_that_is_behind_the_latest_commit_is_noticed(store: Store) -> None:
    behind = RoundOpened(Round(2, (), "one", memory=State(1, 4)))
    (wrong,) = audit(store, *GOOD[:3], behind, *GOOD[4:])
    assert "begins from step 4 in memory, and step 5 was committed" in wrong
