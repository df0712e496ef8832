"""The run's luggage in a user process: the node's own copy, or the bucket's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from spotfit.host import env
from spotfit.model.audience import Hello
from spotfit.ship.luggage import Luggage, Payload, fetch
from spotfit.ship.prepare import prepare
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.worker import birth


def key_of(hello: Hello) -> RunKey:
    """The run's key, as the leader's machine holds it."""
    return RunKey.from_text(hello.secret, hello.run_id)


def open_luggage(luggage: dict[str, Any], key: RunKey, store: Store, scratch: str) -> Payload:
    """Verified either way: a copy on disk is trusted no more than one in a bucket."""
    where = msgspec.convert(luggage, Luggage)
    copy = Path(scratch) / "luggage" / where.sha256
    envelope = copy.read_bytes() if scratch and copy.exists() else fetch(where, store=store)
    return Payload.open(envelope, key=key)


def move_in(
    luggage: dict[str, Any], key: RunKey, store: Store, scratch: str, run_name: str
) -> Payload:
    """The luggage, with its code importable, its variables set and its folder the current one.

    Raises what `ship` raises.
    """
    payload = open_luggage(luggage, key, store, scratch)
    home = Path(scratch or ".")
    prepared = prepare(payload.env, store=store, scratch=home)
    env.update(prepared.env_vars)
    sys.path[:0] = prepared.sys_path
    os.chdir(prepared.cwd or _working_directory(home, run_name))
    birth.shorten_socket_paths()
    return payload


def _working_directory(scratch: Path, run_name: str) -> Path:
    """Of all workers on this node, named after the run, with nothing of ours in it."""
    directory = scratch / "work" / run_name
    directory.mkdir(parents=True, exist_ok=True)
    return directory
