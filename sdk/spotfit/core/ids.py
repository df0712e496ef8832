"""Names of runs, agents and requests: their grammar and how to parse them. It never makes one."""

from __future__ import annotations

import re
from typing import NewType

from spotfit.core.errors import ConfigError

RunId = NewType("RunId", str)
"""One run for ever: 32 hex digits. A run's *name* may be used again, its id never."""

AgentId = NewType("AgentId", str)
"""One life of one agent on one node; a node that boots again has a new one."""

Token = NewType("Token", str)
"""One request for machines; asking twice with it is asking once."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@ -]{0,127}")


def parse_name(text: str, *, what: str) -> str:
    """`text`, if it may be one folder of a bucket path; otherwise a `ConfigError` that says why."""
    if not _NAME.fullmatch(text) or ".." in text or text != text.strip():
        raise ConfigError(
            f"{what} {text!r} cannot be one folder in a bucket: it needs 1 to 128 letters, digits "
            "or ._=+@- that begin with a letter or digit, without '..', '/' or blanks at its ends.",
            do="Choose a plain name; put folders into storage_path.",
        )
    return text
