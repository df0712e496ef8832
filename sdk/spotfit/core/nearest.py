"""'Did you mean …' for every lookup by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known word and the list of all; empty when nothing is known."""
    names = sorted(known)
    if not names:
        return ""
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(names)}."
