"""Options of SkyPilot."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit_provisioners.skypilot.options import SkyPilotOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"launch_mode": "pool"}, "launch_mode='pool'"),
        ({"infra_order": "random"}, "infra_order='random'"),
        ({"spot": "maybe"}, "spot='maybe'"),
        ({"recovery_strategy": "NEVER"}, "recovery_strategy='NEVER'"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"disk_gib": -1}, "disk_gib"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"environment": {"A B": "1"}}, "A B"),
        ({"endpoint": "sky.example.com"}, "is not an http or https URL"),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SkyPilotOptions(**wrong)


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as error_info:
        SkyPilotOptions(workers_per_node=0, endpoint="sky")
    assert len(error_info.value.errors) == 2
