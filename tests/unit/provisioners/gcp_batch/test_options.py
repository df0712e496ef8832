"""Options of Google Cloud Batch."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"max_retries": 11}, "0 to 10"),
        ({"max_retries": -1}, "0 to 10"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"notice_s": -1.0}, "must be at least 0"),
        ({"region": "us-central1", "zones": ("europe-west4-a",)}, "zones outside of the region"),
        (
            {"instance_template": "t", "machine_type": "n2-standard-4"},
            "cannot be combined with machine_type",
        ),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        GcpBatchOptions(**wrong)


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as error_info:
        GcpBatchOptions(max_retries=11, zones=("a-b-c",), instance_template="t", network="n")
    assert len(error_info.value.errors) == 3
