"""Options of AWS Batch."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.aws_batch.options import AwsBatchOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"attempts": 11}, "1 to 10"),
        ({"attempts": 0}, "1 to 10"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"pending_timeout_s": -1.0}, "must be at least 0"),
        ({"queue_order": "price"}, "instance_types"),
        ({"queue_order": "score"}, "instance_types"),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        AwsBatchOptions(**wrong)
