"""Names and labels that are valid on every cloud."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

NAME_PREFIX = "spotfit"
_UNSAFE_CHARACTERS = re.compile(r"[^a-z0-9-]+")


def to_label(text: str, *, max_length: int = 63) -> str:
    """Return `text` reduced to lower case letters, digits and dashes, without dashes at the ends.

    The default length is the limit of DNS labels, which Kubernetes and Google Cloud share.
    """
    safe = _UNSAFE_CHARACTERS.sub("-", text.lower()).strip("-")
    return safe[:max_length].rstrip("-") or "x"


def content_addressed_name(body: Any, *, max_length: int = 63) -> str:
    """Return a name derived from the digest of `body`: equal content has an equal name."""
    digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
    return f"{NAME_PREFIX}-{digest[:16]}"[:max_length]
