"""Workers use the requested devices and number those that they see."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.devices import (
    require_enough_devices,
    visible_device_variables,
    worker_devices,
)
from spotfit.protocol.worker_agent import StartWorker
from tests.unit.frameworks.workers import a_worker_start

NODE = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def worker(gpus: float = 0, **changes: Any) -> StartWorker:
    """Return the second of two workers on a node with four GPUs."""
    plain: dict[str, Any] = {"resources": {"GPU": gpus} if gpus else {}, "devices": NODE}
    place = {"local_rank": 1, "world_size": 4, "local_world_size": 2}
    return a_worker_start(**(plain | place | changes))


def visible_devices(
    start: StartWorker, node_devices: str | None = None, *, beside_peers: bool = True
) -> Any:
    return visible_device_variables(start, node_devices, sees_peer_devices=beside_peers).get(
        "CUDA_VISIBLE_DEVICES"
    )


SHARES = pytest.mark.parametrize(
    ("gpus", "own", "visible"),
    [
        (0, (), ""),
        (1, ("cuda:1",), "0,1"),
        (2, ("cuda:2", "cuda:3"), "0,1,2,3"),
        (0.5, ("cuda:1",), "0,1"),
    ],
)


@SHARES
def test_shared_devices_are_visible_with_every_framework(
    gpus: float, own: tuple[str, ...], visible: str
) -> None:
    start = worker(gpus, share_devices=True)
    assert worker_devices(start, sees_peer_devices=False) == own
    assert visible_devices(start, beside_peers=False) == visible


@SHARES
def test_with_peer_devices_a_worker_sees_those_of_all_workers(
    gpus: float, own: tuple[str, ...], visible: str
) -> None:
    assert worker_devices(worker(gpus), sees_peer_devices=True) == own
    assert visible_devices(worker(gpus)) == visible


@pytest.mark.parametrize(
    ("gpus", "own", "visible"),
    [(0, (), ""), (1, ("cuda:0",), "1"), (2, ("cuda:0", "cuda:1"), "2,3"), (0.5, ("cuda:0",), "1")],
)
def test_without_peer_devices_a_worker_sees_only_its_own(
    gpus: float, own: tuple[str, ...], visible: str
) -> None:
    assert worker_devices(worker(gpus), sees_peer_devices=False) == own
    assert visible_devices(worker(gpus), beside_peers=False) == visible


@pytest.mark.parametrize("beside_peers", [True, False])
@pytest.mark.parametrize("node_devices", ["4,5,6,7", "GPU-a, GPU-b, GPU-c, GPU-d"])
def test_the_node_s_visible_devices_are_passed_by_their_names(
    node_devices: str, beside_peers: bool
) -> None:
    names = [name.strip() for name in node_devices.split(",")]
    expected = names[:2] if beside_peers else names[1:2]
    assert visible_devices(worker(1), node_devices, beside_peers=beside_peers) == ",".join(expected)


def test_visible_devices_are_numbered_from_zero() -> None:
    start = worker(1, devices=("cuda:2", "cuda:3"))
    assert worker_devices(start, sees_peer_devices=True) == ("cuda:1",)
    assert visible_devices(start) == "2,3"


def test_fractional_gpus_are_shared_round_robin() -> None:
    sixth = worker(0.25, local_rank=5, local_world_size=6)
    assert worker_devices(sixth, sees_peer_devices=True) == ("cuda:1",)
    assert visible_devices(sixth) == "0,1,2,3"


def test_a_node_without_gpus_assigns_and_hides_none() -> None:
    bare = worker(1, devices=())
    assert worker_devices(bare, sees_peer_devices=True) == ()
    assert visible_devices(bare) is None
    assert worker_devices(worker(1, spec=msgspec.Raw(b"null")), sees_peer_devices=True) == ()


def test_other_accelerators_keep_their_names() -> None:
    start = worker(1, devices=("xpu:0", "xpu:1"))
    assert worker_devices(start, sees_peer_devices=False) == ("xpu:1",)
    assert visible_devices(start) is None


def test_a_process_has_one_tpu_without_a_number() -> None:
    assert worker_devices(worker(resources={"TPU": 4}, devices=()), sees_peer_devices=True) == (
        "tpu",
    )


def test_neuron_cores_are_assigned_by_local_rank() -> None:
    variables = visible_device_variables(
        worker(resources={"neuron_cores": 2}, devices=()), None, sees_peer_devices=True
    )
    assert variables == {"NEURON_RT_VISIBLE_CORES": "2,3"}


@pytest.mark.parametrize("node_devices", ["", "5", "5,"])
def test_a_variable_that_hides_an_offered_device_is_rejected(node_devices: str) -> None:
    with pytest.raises(ConfigError, match="hides cuda:"):
        visible_devices(worker(1), node_devices)


@pytest.mark.parametrize(("gpus", "devices"), [(1, ()), (1, ("cuda:0",)), (2, NODE[:3]), (0.5, ())])
def test_missing_gpus_are_reported(gpus: float, devices: Any) -> None:
    with pytest.raises(ConfigError, match=f"requests {gpus:g} GPU, but its node has"):
        require_enough_devices(worker(gpus, devices=devices))


@pytest.mark.parametrize(("gpus", "devices"), [(0, ()), (1, NODE[:2]), (2, NODE), (0.5, NODE[:1])])
def test_sufficient_gpus_are_accepted(gpus: float, devices: Any) -> None:
    require_enough_devices(worker(gpus, devices=devices))
