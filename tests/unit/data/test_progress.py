"""Progress bars of passes over a dataset."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from spotfit.data.context import DataContext
from spotfit.data.progress import byte_progress, with_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    before = DataContext.get_current()
    DataContext._set_current(DataContext())
    yield
    DataContext._set_current(before)


def shown(monkeypatch: pytest.MonkeyPatch, count: int, screen: io.StringIO) -> str:
    """What a pass over `count` items writes on standard error."""
    monkeypatch.setattr("sys.stderr", screen)
    assert list(with_progress(range(count), "filter(f)")) == list(range(count))
    return screen.getvalue()


def test_a_terminal_shows_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "filter(f)" in shown(monkeypatch, 20, Terminal())


def test_the_context_disables_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    DataContext.get_current().enable_progress_bars = False
    assert shown(monkeypatch, 20, Terminal()) == ""


def test_a_short_pass_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 3, Terminal()) == ""


def test_a_file_gets_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 20, io.StringIO()) == ""


@pytest.mark.parametrize(
    ("total_bytes", "screen", "is_shown"),
    [(2**30, Terminal(), True), (2**20, Terminal(), False), (2**30, io.StringIO(), False)],
)
def test_bytes_are_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, total_bytes: int, screen: io.StringIO, is_shown: bool
) -> None:
    monkeypatch.setattr("sys.stderr", screen)
    with byte_progress(total_bytes, "Listing files") as advance:
        advance(total_bytes // 2)
    assert ("Listing files" in screen.getvalue()) == is_shown
