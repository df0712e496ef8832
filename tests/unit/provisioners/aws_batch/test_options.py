"""Options of AWS Batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import resolve_options
from spotfit_provisioners.aws_batch.options import AwsBatchOptions


def test_the_region_of_the_caller_is_recorded_for_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader on a machine of another configuration must use the same queues."""
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert resolve_options("aws_batch", {"queues": "spot"})["region"] == "ap-south-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert resolve_options("aws_batch", {"queues": "spot"})["region"] == "eu-west-1"
    of_the_call = resolve_options("aws_batch", {"queues": "spot", "region": "us-east-2"})
    assert of_the_call["region"] == "us-east-2"
    assert "region" not in resolve_options("aws_batch", {"queues": "eu-west-3:spot"})


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
