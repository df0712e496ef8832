"""Times as clouds write them."""

from __future__ import annotations

from datetime import datetime


def to_ms(timestamp: str | None) -> int | None:
    """Return milliseconds since 1970 for a UTC time of RFC 3339; None for any other text.

    Google writes up to nine decimals, Azure up to seven.
    """
    seconds, _, fraction = (timestamp or "").removesuffix("Z").partition(".")
    try:
        at = datetime.fromisoformat(f"{seconds}+00:00")
    except ValueError:
        return None
    return int(at.timestamp()) * 1000 + int(fraction[:3].ljust(3, "0") or 0)
