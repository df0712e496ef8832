"""Options of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.kubernetes.options import KubernetesOptions


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"grace_s": -1.0}, "must be at least 0"),
        ({"server": "http://x", "context": "y"}, "selects two clusters"),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        KubernetesOptions(**wrong)
