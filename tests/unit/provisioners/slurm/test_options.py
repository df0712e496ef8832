"""What can be chosen of Slurm, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.slurm.options import SlurmOptions


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"grace_s": -1.0}, "must be at least 0"),
        ({"memory_per_cpu_gib": -1.0}, "must be at least 0"),
        ({"environment": {"A B": "1"}}, "A B"),
        ({"extra_args": ("--nice", "100")}, "not an option of sbatch"),
    ],
)
def test_what_cannot_be_meant_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SlurmOptions(**wrong)
