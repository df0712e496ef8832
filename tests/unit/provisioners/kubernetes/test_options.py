"""What can be chosen of Kubernetes, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.kubernetes.options import KubernetesOptions


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"grace_s": -1.0}, "must be at least 0"),
        ({"server": "http://x", "context": "y"}, "selects two clusters"),
    ],
)
def test_what_cannot_be_meant_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        KubernetesOptions(**wrong)
