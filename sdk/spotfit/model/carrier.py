"""The messages between an agent and the process that uploads for its workers."""

from __future__ import annotations

import msgspec


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Upload this parcel, after all others of the same rank."""

    serial: int
    """The agent's own number for it."""
    rank: int
    storage_url: str
    """The run's root."""
    parcel: bytes


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """The files and their manifest are in the bucket."""

    serial: int
    size_bytes: int
    step: int | None = None
    """Of a snapshot: how many steps were done."""


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """It could not be uploaded: the traceback, and the pickled exception if it has one."""

    serial: int
    told: str
    value: bytes = b""


FromCarrier = Brought | Lost
