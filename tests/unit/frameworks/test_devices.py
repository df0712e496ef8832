"""A worker uses what it asked for, whatever its node has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spotfit.core.codec import encode
from spotfit.core.ids import RunId
from spotfit.frameworks.devices import own_devices
from spotfit.model.spec import RunSpec
from spotfit.model.wire import Start

NODE = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def worker(gpus: float, **changes: Any) -> Start:
    wanted = {"GPU": gpus} if gpus else {}
    spec = RunSpec(RunId("r"), "run", "f", 1, 1, resources_per_worker=wanted)
    plain: dict[str, Any] = {
        "run_id": "r",
        "run_name": "run",
        "round": 1,
        "rank": 0,
        "local_rank": 1,
        "world_size": 4,
        "local_world_size": 4,
        "node_rank": 0,
        "host": "127.0.0.1",
        "storage_url": "",
        "framework": "torch",
        "framework_options": {},
        "luggage": {},
        "devices": NODE,
        "spec": msgspec.Raw(encode(spec)),
    }
    return Start(**(plain | changes))


@pytest.mark.parametrize(
    ("gpus", "own"),
    [
        (0, ()),
        (1, ("cuda:1",)),
        (2, ("cuda:2", "cuda:3")),
        (0.5, ("cuda:1",)),
    ],
)
def test_each_gets_its_share(gpus: float, own: tuple[str, ...]) -> None:
    assert own_devices(worker(gpus)) == own


def test_less_than_one_is_shared() -> None:
    assert own_devices(worker(0.25, local_rank=5)) == ("cuda:1",)


def test_a_node_without_any_gives_none() -> None:
    assert own_devices(worker(1, devices=())) == ()
    assert own_devices(worker(1, spec=msgspec.Raw(b"null"))) == ()
