"""Software: what machines will run, as far as their backend knows before one of them is there."""

from __future__ import annotations

import msgspec


class Software(msgspec.Struct, frozen=True):
    """Python and packages of machines to come. What is not said is not known: it is compared on
    the machine, before any code of the user's is loaded there."""

    python: str = ""
    """As '3.12' or '3.12.4'; '' is not known."""
    implementation: str = "cpython"
    packages: dict[str, str] = {}
    """Distribution to version, as far as known. One that is not listed may be there or not."""


UNKNOWN = Software()
