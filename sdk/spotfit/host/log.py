"""Structured logging through the standard library.

`info("checkpoint.committed", name="epoch-3")` emits a record with the message
"checkpoint.committed" on the logger "spotfit.checkpoint" (the event name up to its first dot). Each
field is an attribute of the record, as with `extra=`. Users can therefore filter, route and format
the records with the `logging` module.

Importing this module configures nothing. The processes of spotfit and the entry points of the
driver (`fit()`, `submit()`, `attach()`, the command line) call `use_default_handler`, which prints
one line per record on standard error unless the user has added a handler to the logger "spotfit".
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any, TextIO

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import LOG_LEVELS
from spotfit.core.units import strip_control_characters
from spotfit.host import env

_ROOT = logging.getLogger("spotfit")
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LineFormatter(logging.Formatter):
    """Formats a record as `12:00:00.250 INFO    round.opened round=3 reason="no capacity"`.

    A field `text`, a sentence for users, follows the event name without quotes.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line in local time, without a line break at its end."""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        millis = int(record.created * 1000) % 1000
        extra = {k: v for k, v in vars(record).items() if k not in _RECORD_ATTRIBUTES}
        text = str(extra.pop("text", ""))
        sentence = f": {text if text.isprintable() else _format_value(text)}" if text else ""
        fields = "".join(
            f" {name.removesuffix('_')}={_format_value(value)}" for name, value in extra.items()
        )
        return f"{when}.{millis:03d} {record.levelname:<7} {record.getMessage()}{sentence}{fields}"


class _StderrHandler(logging.Handler):
    # Unlike logging.StreamHandler it looks up sys.stderr for each record: worker processes and
    # tests replace it after the handler was installed.
    owns_level = True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(sys.stderr, self.format(record))
        except (OSError, ValueError):  # a closed stderr must not stop training
            return


def write_line(stream: TextIO, text: str) -> None:
    """Write a line or several lines to `stream`, with a line break at the end, and flush.

    Characters that the encoding of the stream lacks are written as '?'. Raises what the stream
    raises, such as `ValueError` if it is closed.
    """
    line = f"{text}\n"
    try:
        stream.write(line)
    except UnicodeEncodeError:  # a redirected stream has the code page of the system on Windows
        encoding = getattr(stream, "encoding", None) or "ascii"  # objects of users may lack it
        stream.write(line.encode(encoding, "replace").decode(encoding))
    stream.flush()


_default_handler = _StderrHandler()
_default_handler.setFormatter(LineFormatter())


def use_default_handler() -> None:
    """Print records of the logger "spotfit" on standard error, unless the user configured it.

    The user has configured it by adding a handler. Called by `fit()`, the command line and the
    processes of spotfit. Idempotent. A level that the user has set is kept; otherwise it is
    SPOTFIT_LOG_LEVEL or INFO.
    """
    if _ROOT.handlers:
        return
    _ROOT.addHandler(_default_handler)
    # Otherwise a root handler, for example that of logging.basicConfig, would print them again.
    _ROOT.propagate = False
    _default_handler.owns_level = _ROOT.level == logging.NOTSET
    set_level(env.LOG_LEVEL.default)


def set_level(level: str) -> None:
    """Set the least level that this process logs, a name such as `"INFO"`.

    SPOTFIT_LOG_LEVEL takes precedence over `level`. Does nothing before `use_default_handler`, or
    if the user has configured a handler or the level of the logger "spotfit".
    """
    if _default_handler in _ROOT.handlers and _default_handler.owns_level:
        # An invalid variable counts as unset; env.check_all() reports it together with all others.
        with suppress(ConfigError):
            if env.lookup(env.LOG_LEVEL.name) is not None:
                level = env.read(env.LOG_LEVEL)
        # NOTSET means everything here; for `logging` it would mean the level of the root logger.
        _ROOT.setLevel(max(LOG_LEVELS[level], 1))


def debug(event: str, /, **fields: Any) -> None:
    """Log details for diagnosis. `event` is a constant such as `"fork_server.ready"`.

    The record is emitted on the logger "spotfit.fork_server"; `fields` are its attributes.
    """
    _log(logging.DEBUG, event, fields)


def info(event: str, /, **fields: Any) -> None:
    """Log a change of state that users want to see, such as `"checkpoint.restored"`.

    The record is emitted on the logger "spotfit.checkpoint"; `fields` are its attributes.
    """
    _log(logging.INFO, event, fields)


def warning(event: str, /, **fields: Any) -> None:
    """Log a problem that spotfit handles without stopping, such as `"fork_server.died"`.

    The record is emitted on the logger "spotfit.fork_server"; `fields` are its attributes.
    """
    _log(logging.WARNING, event, fields)


def error(event: str, /, **fields: Any) -> None:
    """Log a failure that ended an operation, such as `"worker_pool.start_failed"`.

    The record is emitted on the logger "spotfit.worker_pool"; `fields` are its attributes.
    """
    _log(logging.ERROR, event, fields)


def _log(level: int, event: str, fields: dict[str, Any]) -> None:
    logger = _ROOT.getChild(event.partition(".")[0])
    # Before the fields are copied: a disabled debug record must cost little.
    if logger.isEnabledFor(level):
        # LogRecord refuses to overwrite its own attributes, for example `name`.
        extra = {f"{key}_" if key in _RECORD_ATTRIBUTES else key: fields[key] for key in fields}
        # stacklevel: the caller of debug(), info(), warning() or error(), two frames above.
        logger.log(level, event, extra=extra, stacklevel=3)


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    needs_no_quotes = text and text.isprintable() and not set(text) & {" ", '"', "="}
    # JSON escapes the control characters below 32 only.
    return (
        text if needs_no_quotes else strip_control_characters(json.dumps(text, ensure_ascii=False))
    )
