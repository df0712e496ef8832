"""Identifier types, and validation of user-chosen names. `host.system` generates identifiers."""

from __future__ import annotations

import re
from typing import NewType

from spotfit.core.errors import ConfigError

RunId = NewType("RunId", str)
"""32 hex digits. A run's *name* may be used again after the run was deleted; its id never is."""

AgentId = NewType("AgentId", str)
"""One start of an agent process on one node; an agent that restarts gets a new id."""

Token = NewType("Token", str)
"""Idempotency key of one request for machines."""

# A conservative subset of what S3, GCS, Azure and POSIX accept as one path component.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@ -]{0,127}")


def parse_name(text: str, *, what: str) -> str:
    """Return `text` unchanged if it is valid as one directory name in a bucket or file system.

    For names that users choose, such as `RunConfig(name=...)`: 1 to 128 letters, digits, inner
    spaces or ._=+@-, starting with a letter or digit, without '..'. Raises `ConfigError` for any
    other text; `what` is the subject of its message, such as "The run's name".
    """
    if not _NAME.fullmatch(text) or ".." in text or text != text.strip():
        raise ConfigError(
            f"{what} {text!r} is not a valid directory name: it needs 1 to 128 letters, digits "
            "or ._=+@- and must start with a letter or digit, without '..', '/' or surrounding "
            "spaces.",
            do="Choose a plain name such as 'experiment-1'. Parent directories of a run are part "
            "of storage_path.",
        )
    return text
