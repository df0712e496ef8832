"""Workers as a framework is told of them."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.codec import encode
from spotfit.core.ids import RunId
from spotfit.model.spec import RunSpec
from spotfit.model.wire import Start


def a_worker(
    *, wants: dict[str, float] | None = None, options: dict[str, Any] | None = None, **place: Any
) -> Start:
    """Alone on its node unless `place` says otherwise; `wants` are its resources."""
    spec = RunSpec(RunId("r"), "run", "f", 1, 1, resources_per_worker=wants or {})
    plain: dict[str, Any] = {
        "run_id": "r",
        "run_name": "run",
        "round": 3,
        "rank": 0,
        "local_rank": place.get("rank", 0),
        "world_size": 1,
        "local_world_size": place.get("world_size", 1),
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "",
        "framework": "torch",
        "framework_options": options or {},
        "luggage": {},
        "spec": msgspec.Raw(encode(spec)),
    }
    return Start(**(plain | place))
