from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.data.feeders import Feeders
from spotfit.model.spec import FeederSpec


@pytest.mark.parametrize(("nodes", "expected"), [(2, (2, 2)), ((0, 4), (0, 4)), (0, (0, 0))])
def test_the_spec_has_the_numbers_of_machines(nodes: Any, expected: tuple[int, int]) -> None:
    assert Feeders(nodes=nodes, cpus=16, processes=3).spec == FeederSpec(
        min_nodes=expected[0],
        max_nodes=expected[1],
        resources={"CPU": 16.0},
        processes_per_worker=3,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"nodes": -1},
        {"nodes": (3, 2)},
        {"nodes": (1, 2, 3)},
        {"nodes": "2"},
        {"nodes": True},
        {"cpus": 0},
        {"cpus": "16"},
        {"processes": -1},
        {"processes": 1.5},
    ],
)
def test_invalid_values_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"Feeders\\({name}="):
        Feeders(**arguments)


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors, match=r"(?s)nodes=-1.*cpus=0"):
        Feeders(nodes=-1, cpus=0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nodes": 2, "provisioner": ["local", "slurm"]}, "names several backends"),
        ({"provisioner": "local"}, "has no effect without machines"),
        ({"nodes": (0, 0), "provisioner": "local"}, "has no effect without machines"),
    ],
)
def test_a_backend_of_their_own_is_one_and_has_machines(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Feeders(**arguments)
