"""What can be chosen of SkyPilot, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit_provisioners.skypilot.options import SkyPilotOptions


@pytest.mark.parametrize(
    ("wrong", "told"),
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
def test_what_cannot_be_meant_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SkyPilotOptions(**wrong)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as told:
        SkyPilotOptions(workers_per_node=0, endpoint="sky")
    assert len(told.value.errors) == 2
