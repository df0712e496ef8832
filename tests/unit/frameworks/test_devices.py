"""A worker uses what it asked for, sees no more than it should, and numbers what it sees."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.devices import own_devices, refuse_too_few, visibility
from spotfit.model.wire import Start
from tests.unit.frameworks.workers import a_worker

NODE = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def worker(gpus: float = 0, **changes: Any) -> Start:
    """The second of two workers on a node with four GPUs."""
    plain: dict[str, Any] = {"wants": {"GPU": gpus} if gpus else {}, "devices": NODE}
    place = {"local_rank": 1, "world_size": 4, "local_world_size": 2}
    return a_worker(**(plain | place | changes))


def shown(start: Start, told: str | None = None, *, beside_peers: bool = True) -> Any:
    return visibility(start, told, beside_peers=beside_peers).get("CUDA_VISIBLE_DEVICES")


SHARES = pytest.mark.parametrize(
    ("gpus", "own", "seen"),
    [
        (0, (), ""),
        (1, ("cuda:1",), "0,1"),
        (2, ("cuda:2", "cuda:3"), "0,1,2,3"),
        (0.5, ("cuda:1",), "0,1"),
    ],
)


@SHARES
def test_a_backend_may_want_workers_to_see_each_others_whatever_the_framework(
    gpus: float, own: tuple[str, ...], seen: str
) -> None:
    start = worker(gpus, share_devices=True)
    assert own_devices(start, beside_peers=False) == own
    assert shown(start, beside_peers=False) == seen


@SHARES
def test_beside_its_peers_each_sees_what_all_of_its_node_use(
    gpus: float, own: tuple[str, ...], seen: str
) -> None:
    assert own_devices(worker(gpus), beside_peers=True) == own
    assert shown(worker(gpus)) == seen


@pytest.mark.parametrize(
    ("gpus", "own", "seen"),
    [(0, (), ""), (1, ("cuda:0",), "1"), (2, ("cuda:0", "cuda:1"), "2,3"), (0.5, ("cuda:0",), "1")],
)
def test_by_itself_each_sees_its_own_and_counts_from_zero(
    gpus: float, own: tuple[str, ...], seen: str
) -> None:
    assert own_devices(worker(gpus), beside_peers=False) == own
    assert shown(worker(gpus), beside_peers=False) == seen


@pytest.mark.parametrize("beside_peers", [True, False])
@pytest.mark.parametrize("told", ["4,5,6,7", "GPU-a, GPU-b, GPU-c, GPU-d"])
def test_what_the_node_may_see_is_passed_on_by_the_names_it_has_there(
    told: str, beside_peers: bool
) -> None:
    names = [name.strip() for name in told.split(",")]
    mine = names[:2] if beside_peers else names[1:2]
    assert shown(worker(1), told, beside_peers=beside_peers) == ",".join(mine)


def test_devices_that_were_named_for_a_node_are_counted_from_zero() -> None:
    told = worker(1, devices=("cuda:2", "cuda:3"))
    assert own_devices(told, beside_peers=True) == ("cuda:1",)
    assert shown(told) == "2,3"


def test_less_than_one_is_shared_in_turn() -> None:
    sixth = worker(0.25, local_rank=5, local_world_size=6)
    assert own_devices(sixth, beside_peers=True) == ("cuda:1",)
    assert shown(sixth) == "0,1,2,3"


def test_a_node_without_any_gives_none_and_hides_nothing() -> None:
    bare = worker(1, devices=())
    assert own_devices(bare, beside_peers=True) == ()
    assert shown(bare) is None
    assert own_devices(worker(1, spec=msgspec.Raw(b"null")), beside_peers=True) == ()


def test_other_accelerators_keep_their_names() -> None:
    told = worker(1, devices=("xpu:0", "xpu:1"))
    assert own_devices(told, beside_peers=False) == ("xpu:1",)
    assert shown(told) is None


def test_a_process_has_one_tpu_whose_number_its_runtime_knows() -> None:
    assert own_devices(worker(wants={"TPU": 4}, devices=()), beside_peers=True) == ("tpu",)


def test_neuron_cores_are_dealt_out_in_turn() -> None:
    told = visibility(worker(wants={"neuron_cores": 2}, devices=()), None, beside_peers=True)
    assert told == {"NEURON_RT_VISIBLE_CORES": "2,3"}


@pytest.mark.parametrize("told", ["", "5", "5,"])
def test_a_variable_that_hides_what_the_node_offers_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match="shows no cuda:"):
        shown(worker(1), told)


@pytest.mark.parametrize(("gpus", "devices"), [(1, ()), (1, ("cuda:0",)), (2, NODE[:3]), (0.5, ())])
def test_a_worker_without_what_it_asked_for_says_so(gpus: float, devices: Any) -> None:
    with pytest.raises(ConfigError, match=f"asked for {gpus:g} GPU; its node has"):
        refuse_too_few(worker(gpus, devices=devices))


@pytest.mark.parametrize(("gpus", "devices"), [(0, ()), (1, NODE[:2]), (2, NODE), (0.5, NODE[:1])])
def test_a_worker_with_what_it_asked_for_does_not(gpus: float, devices: Any) -> None:
    refuse_too_few(worker(gpus, devices=devices))
