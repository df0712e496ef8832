"""Tests of the file notice source."""

from pathlib import Path

import pytest

from spotfit.agent.notices.local_sources import FileNoticeSource


def test_no_file_is_no_notice(tmp_path: Path) -> None:
    assert FileNoticeSource(print, tmp_path / "notice").poll(0) is None
    assert FileNoticeSource(print).poll(0) is None


def test_the_file_holds_the_remaining_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    path.write_text('{"reason": "spot reclaim", "seconds_left": 30}')
    monkeypatch.setenv("SPOTFIT_NOTICE_FILE", str(path))
    notice = FileNoticeSource(print).poll(0)
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("spot reclaim", 30)
    assert notice.deadline_ms > 0


def test_an_invalid_file_is_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text("{")
    notice = FileNoticeSource(print, path).poll(0)
    assert notice is not None
    assert notice.seconds_left is None
