"""Ranks: who a process is among those that train together."""

from __future__ import annotations

import msgspec


class Ranks(msgspec.Struct, frozen=True):
    """Who this process is; alone, unless somebody says otherwise."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
