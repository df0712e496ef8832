"""The run's luggage in a user process: the node's own copy, or the bucket's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from spotfit.ship.luggage import Luggage, Payload, fetch
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store


def open_luggage(luggage: dict[str, Any], key: RunKey, store: Store, scratch: str) -> Payload:
    """Verified either way: a copy on disk is trusted no more than one in a bucket."""
    where = msgspec.convert(luggage, Luggage)
    copy = Path(scratch) / "luggage" / where.sha256
    envelope = copy.read_bytes() if scratch and copy.exists() else fetch(where, store=store)
    return Payload.open(envelope, key=key)
