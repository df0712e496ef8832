"""A line of the log: one event, its facts as fields, found by a grep."""

import io
import sys

import pytest

from spotfit.host import log


def test_facts_are_fields_and_odd_ones_are_quoted() -> None:
    facts = {"number": 3, "why": "no peer\nleft", "empty": ""}
    told = log.line("INFO", "round.opened", facts, at=0.25)
    assert told.endswith(r'.250 INFO    round.opened number=3 why="no peer\nleft" empty=""' + "\n")
    assert told.count("\n") == 1


def test_what_is_below_the_level_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "WARNING")
    log.info("quiet")
    log.error("loud", code=1)
    said = capsys.readouterr().err
    assert "loud code=1" in said
    assert "quiet" not in said


def test_the_run_says_how_much_is_told_and_the_environment_overrules_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_run_s_level", "INFO")
    monkeypatch.delenv("SPOTFIT_LOG_LEVEL", raising=False)
    log.at_least("CRITICAL")
    log.error("muted")
    log.at_least("NOTSET")
    log.debug("heard")
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "info")
    log.debug("overruled")
    said = capsys.readouterr().err
    assert [word for word in ("muted", "heard", "overruled") if word in said] == ["heard"]


def test_a_closed_stream_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.error("nobody.listens")
