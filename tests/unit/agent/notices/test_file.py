"""A file is a notice, even one that nobody can read."""

from pathlib import Path

import pytest

from spotfit.agent.notices.file import FileNotice


def test_no_file_is_no_notice(tmp_path: Path) -> None:
    assert FileNotice(print, tmp_path / "notice").poll(0) is None
    assert FileNotice(print).poll(0) is None


def test_the_file_says_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    path.write_text('{"reason": "spot reclaim", "seconds_left": 30}')
    monkeypatch.setenv("SPOTFIT_NOTICE_FILE", str(path))
    notice = FileNotice(print).poll(0)
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("spot reclaim", 30)
    assert notice.deadline_ms > 0


def test_a_file_that_cannot_be_read_is_a_notice_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text("{")
    notice = FileNotice(print, path).poll(0)
    assert notice is not None
    assert notice.seconds_left is None
