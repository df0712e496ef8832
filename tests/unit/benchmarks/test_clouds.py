"""Tables of preemptions and idle requests."""

from pathlib import Path

from benchmarks.clouds import IdleRequests, Reclaim, idle_table, reclaim_table, rounds


def test_attempts_are_separate_and_ordered(tmp_path: Path) -> None:
    (tmp_path / "0-bb").write_text("12.0\n13.0\n")
    (tmp_path / "0-aa").write_text("20.5\n")
    (tmp_path / "1-cc").write_text("11.0\n")
    assert rounds(tmp_path) == [[12.0, 13.0], [20.5]]


def test_reclaim_table_has_one_row_per_cloud() -> None:
    found = [Reclaim("plain", True, 33.0, 0.4), Reclaim("plain", False, 35.0, 34.5)]
    last = reclaim_table(found, 30.0).strip().splitlines()[-1]
    assert last == "| plain | 33.0 s | 95.0 s | 0.4 s | 34.5 s | 4.5 s |"


def test_idle_table_omits_kinds_without_requests() -> None:
    requests = IdleRequests("plain", 16, 5.0, 720.4, {"GET": 3600.0, "DELETE": 0.0})
    assert "| plain | 5 s | 720 | 3600 GET |" in idle_table([requests])
