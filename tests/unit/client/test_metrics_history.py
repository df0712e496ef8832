"""The stored reports of all leaders are one history; the latest ones give step and speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.client.metrics_history import ProgressReader, ReportedProgress, read_metrics_history
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.store.api import ObjectInfo
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import a_committed_checkpoint, a_view, an_agent_id

A, B = an_agent_id(0), an_agent_id(1)


def write(
    store: MemoryStore, leader: AgentId, chunk: int, *reports: tuple[int, int, dict[str, Any]]
) -> None:
    """Write a chunk of reports, each given as round, index and metrics, one per second."""
    lines = [
        encode(
            {
                "round": number,
                "report_index": index,
                "t": 1_000_000 + index * 1000,
                "checkpoint": f"c{index}" if "saved" in metrics else None,
                "metrics": metrics,
            }
        )
        for number, index, metrics in reports
    ]
    store.put(keys.reports(leader, chunk), b"\n".join(lines) + b"\n")


def test_reports_of_all_leaders_are_in_the_order_of_rounds() -> None:
    store = MemoryStore()
    write(store, A, 0, (2, 0, {"x": 3}))
    write(store, B, 0, (1, 0, {"x": 1}))
    write(store, B, 1, (1, 1, {"x": {"__float__": "inf"}}))
    history = read_metrics_history(store)
    assert [(each.round, each.report_index) for each in history] == [(1, 0), (1, 1), (2, 0)]
    assert [each.metrics["x"] for each in history] == [1, float("inf"), 3]
    assert history[1].reported_at_ms == 1_001_000


def test_a_run_without_reports_has_an_empty_history() -> None:
    assert read_metrics_history(MemoryStore()) == []


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"round": 1}'])
def test_a_corrupt_chunk_is_named(body: bytes) -> None:
    store = MemoryStore()
    store.put(keys.reports(A, 3), body)
    with pytest.raises(IntegrityError, match=r"00000003\.jsonl cannot be decoded"):
        read_metrics_history(store)


def test_the_progress_has_the_step_and_speed_of_the_last_round() -> None:
    store = MemoryStore()
    write(store, A, 0, (1, 9, {"step": 900}))
    write(store, A, 1, *((2, n, {"step": 100 + 5 * n, "loss": n}) for n in range(4)))
    progress = ProgressReader(store).read(a_view())
    assert progress == ReportedProgress(step=115, steps_per_s=5.0, metrics={"step": 115, "loss": 3})


def test_the_steps_of_checkpoints_are_used_without_a_metric_step() -> None:
    store = MemoryStore()
    write(store, A, 0, (1, 0, {"saved": True}), (1, 2, {"saved": True}))
    saved = [
        a_committed_checkpoint(f"c{n}", report_index=n, step=step) for n, step in ((0, 10), (2, 40))
    ]
    progress = ProgressReader(store).read(a_view(checkpoints=tuple(saved)))
    assert (progress.step, progress.steps_per_s) == (40, 15.0)


def test_a_new_leader_without_reports_has_the_step_of_the_latest_checkpoint() -> None:
    saved = a_committed_checkpoint("c0", step=10)
    assert ProgressReader(MemoryStore()).read(a_view(checkpoints=(saved,))) == ReportedProgress(
        step=10
    )
    assert ProgressReader(MemoryStore()).read(a_view(leader=None)) == ReportedProgress()


def test_corrupt_reports_do_not_hide_the_status() -> None:
    store = MemoryStore()
    store.put(keys.reports(A, 0), b"{")
    saved = a_committed_checkpoint("c0", step=10)
    assert ProgressReader(store).read(a_view(checkpoints=(saved,))) == ReportedProgress(step=10)


@pytest.mark.parametrize(
    "line",
    [
        b'{"round": "a", "report_index": 0, "checkpoint": null, "metrics": {}}',
        b'{"round": 1, "report_index": 0, "checkpoint": [1], "metrics": {}}',
        b'{"round": 1, "report_index": 0, "checkpoint": null, "metrics": [1]}',
        b'{"round": 1, "report_index": 0, "checkpoint": null, "metrics": {}, "t": "x"}',
        b"[" * 100_000,
    ],
)
def test_chunk_with_values_of_other_types_is_an_integrity_error(line: bytes) -> None:
    store = MemoryStore()
    store.put(f"{keys.REPORTS}a/0.jsonl", line)
    with pytest.raises(IntegrityError, match="cannot be decoded"):
        read_metrics_history(store)


def test_a_later_read_lists_only_new_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for chunk in range(12):
        write(store, A, chunk, (1, chunk, {"step": chunk}))
    progress = ProgressReader(store)
    assert progress.read(a_view()).step == 11
    write(store, A, 12, (1, 12, {"step": 12}))
    listed = []

    def list_after(prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        found = list(MemoryStore.list(store, prefix, after=after))
        listed.append(len(found))
        return iter(found)

    monkeypatch.setattr(store, "list", list_after)
    assert progress.read(a_view()).step == 12
    assert listed == [1]
