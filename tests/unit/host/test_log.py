"""Structured logging through the standard library."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from spotfit.host import log


@pytest.fixture(autouse=True)
def spotfit_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger "spotfit" as it is in a new process; its configuration is restored afterwards."""
    monkeypatch.delenv("SPOTFIT_LOG_LEVEL", raising=False)
    logger = logging.getLogger("spotfit")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


def test_the_default_line_holds_the_event_and_quotes_unusual_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.use_default_handler()
    log.info("round.opened", number=3, reason="no peer\nleft", empty="")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r' INFO    round.opened number=3 reason="no peer\nleft" empty=""')


def test_control_characters_of_fields_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    log.use_default_handler()
    log.warning("round.closed", reason="a\x1b[2J\x9b2Kb\x7f", text="c\x9b2J")
    printed = capsys.readouterr().err
    assert printed.endswith(r'round.closed: "c" reason="a\u001b[2Jb"' + "\n")


def test_a_sentence_follows_the_event_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    log.use_default_handler()
    log.info("run.event", type="x", text='run "a" = started')
    log.info("run.event", text="two\nlines")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(' run.event: run "a" = started type=x')
    assert second.endswith(r' run.event: "two\nlines"')


def test_a_record_has_the_event_as_message_and_fields_as_attributes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning("checkpoint.incomplete", name="epoch-3", shards=2)
    (record,) = caplog.records
    assert record.name == "spotfit.checkpoint"
    assert record.getMessage() == "checkpoint.incomplete"
    assert vars(record)["shards"] == 2
    assert (
        record.funcName == test_a_record_has_the_event_as_message_and_fields_as_attributes.__name__
    )


def test_a_field_named_like_an_attribute_of_records_gets_an_underscore(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("checkpoint.incomplete", name="epoch-3")
    assert vars(caplog.records[0])["name_"] == "epoch-3"
    log.use_default_handler()
    log.warning("checkpoint.incomplete", name="epoch-3")
    assert capsys.readouterr().err.endswith("checkpoint.incomplete name=epoch-3\n")


def test_a_handler_of_the_user_replaces_the_default_one(
    spotfit_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    spotfit_logger.addHandler(logging.StreamHandler(stream))
    spotfit_logger.setLevel("ERROR")
    log.use_default_handler()
    log.set_level("DEBUG")
    log.info("run.event")
    log.error("run.failed", code=1)
    assert stream.getvalue() == "run.failed\n"
    assert not capsys.readouterr().err


def test_a_level_of_the_user_is_kept_by_the_default_handler(
    spotfit_logger: logging.Logger,
) -> None:
    spotfit_logger.setLevel("ERROR")
    log.use_default_handler()
    log.use_default_handler()
    assert len(spotfit_logger.handlers) == 1
    assert spotfit_logger.level == logging.ERROR


def test_records_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    log.use_default_handler()
    log.set_level("WARNING")
    log.info("quiet")
    log.error("loud", code=1)
    assert capsys.readouterr().err.endswith("loud code=1\n")
    log.set_level("NOTSET")
    log.debug("details")
    assert "details" in capsys.readouterr().err


def test_the_environment_takes_precedence_over_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "warning")
    log.use_default_handler()
    log.set_level("DEBUG")
    log.info("quiet")
    assert not capsys.readouterr().err


def test_an_invalid_level_in_the_environment_is_left_to_check_all(
    monkeypatch: pytest.MonkeyPatch, spotfit_logger: logging.Logger
) -> None:
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "loud")
    log.use_default_handler()
    assert spotfit_logger.level == logging.INFO


def test_a_closed_standard_error_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log.use_default_handler()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.error("run.failed")


def test_characters_that_the_stream_cannot_encode_are_replaced() -> None:
    sink = io.BytesIO()
    stream = io.TextIOWrapper(sink, encoding="cp1252")  # a redirected stream on Windows
    log.write_line(stream, "für ✓")
    assert sink.getvalue().decode("cp1252").splitlines() == ["für ?"]


def test_a_stream_of_the_user_without_an_encoding_is_supported() -> None:
    class Tee:
        text = ""

        def write(self, text: str) -> None:
            text.encode("ascii")
            self.text += text

        def flush(self) -> None:
            pass

    tee = Tee()
    log.write_line(tee, "für")  # type: ignore[arg-type]
    assert tee.text == "f?r\n"


def test_a_record_that_stderr_cannot_encode_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(sink, encoding="cp1252"))
    log.use_default_handler()
    log.info("run.event", text="✓ done")
    assert b"? done" in sink.getvalue()
