"""What happens, told in one line each on standard error: an event's name, and facts as fields."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from spotfit.core.levels import LEVELS
from spotfit.host import env

_run_s_level: str = env.LOG_LEVEL.default


def at_least(level: str) -> None:
    """From now on this process tells nothing below that level, as the run it serves wants it."""
    global _run_s_level  # a process serves one run at a time
    _run_s_level = level


def debug(event: str, /, **facts: Any) -> None:
    """Of use to whoever looks for a fault."""
    _tell("DEBUG", event, facts)


def info(event: str, /, **facts: Any) -> None:
    """Something happened that a reader of the log wants to know."""
    _tell("INFO", event, facts)


def warning(event: str, /, **facts: Any) -> None:
    """Something is not as it should be, and we go on."""
    _tell("WARNING", event, facts)


def error(event: str, /, **facts: Any) -> None:
    """Something ended that should not have."""
    _tell("ERROR", event, facts)


def line(level: str, event: str, facts: dict[str, Any], *, at: float) -> str:
    """One line of the log."""
    when = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
    fields = "".join(f" {name}={_field(fact)}" for name, fact in facts.items())
    return f"{when} {level:<7} {event}{fields}\n"


def _tell(level: str, event: str, facts: dict[str, Any]) -> None:
    if LEVELS[level] < LEVELS[_least()]:
        return
    try:
        sys.stderr.write(line(level, event, facts, at=time.time()))
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody listens any more; that must not stop the work
        return


def _least() -> str:
    """What the environment says overrules the run."""
    return env.value(env.LOG_LEVEL) if env.lookup(env.LOG_LEVEL.name) else _run_s_level


def _field(fact: Any) -> str:
    text = fact if isinstance(fact, str) else str(fact)
    plain = text and text.isprintable() and not set(text) & {" ", '"', "="}
    return text if plain else json.dumps(text, ensure_ascii=False)
