"""Names and labels that every cloud accepts, made from names that it would not."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

PREFIX = "spotfit"
_SAFE = re.compile(r"[^a-z0-9-]+")


def label(text: str, *, longest: int = 63) -> str:
    """Lower case letters, digits and dashes, beginning and ending with one of the former two."""
    safe = _SAFE.sub("-", text.lower()).strip("-")
    return safe[:longest].rstrip("-") or "x"


def content_name(body: Any, *, longest: int = 63) -> str:
    """A name for that content: equal for equal content, another one for any other."""
    digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
    return f"{PREFIX}-{digest[:16]}"[:longest]
