"""StartWorker messages for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.codec import encode
from spotfit.core.ids import RunId
from spotfit.model.spec import RunSpec
from spotfit.protocol.worker_agent import StartWorker


def a_worker_start(
    *,
    resources: dict[str, float] | None = None,
    options: dict[str, Any] | None = None,
    **assignment: Any,
) -> StartWorker:
    """Return the message of a worker that is alone unless `assignment` says otherwise."""
    spec = RunSpec(
        run_id=RunId("r"),
        name="run",
        fit_id="f",
        min_workers=1,
        max_workers=1,
        resources_per_worker=resources or {},
    )
    plain: dict[str, Any] = {
        "run_id": "r",
        "run_name": "run",
        "round": 3,
        "rank": 0,
        "local_rank": assignment.get("rank", 0),
        "world_size": 1,
        "local_world_size": assignment.get("world_size", 1),
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "",
        "framework": "torch",
        "framework_options": options or {},
        "code_bundle": {},
        "spec": msgspec.Raw(encode(spec)),
    }
    return StartWorker(**(plain | assignment))
