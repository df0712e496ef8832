"""Options of Slurm."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.slurm.options import SlurmOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"grace_s": -1.0}, "must be at least 0"),
        ({"memory_per_cpu_gib": -1.0}, "must be at least 0"),
        ({"environment": {"A B": "1"}}, "A B"),
        ({"extra_args": ("--nice", "100")}, "not an option of sbatch"),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SlurmOptions(**wrong)
