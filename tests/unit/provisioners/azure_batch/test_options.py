"""Options of Azure Batch."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit_provisioners.azure_batch.options import AzureBatchOptions

SIGNED = "https://x.blob.core.windows.net/c/f?sv=2024-01-01&sig=abc"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"max_nodes": 101}, "1 to 100"),
        ({"max_nodes": 0}, "1 to 100"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"vm_image": "ubuntu"}, "is not an image reference"),
        ({"public_ip": False}, "needs a subnet"),
        ({"resource_files": (SIGNED,)}, "stored unencrypted"),
    ],
)
def test_invalid_values_are_rejected(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        AzureBatchOptions(**wrong)


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as error_info:
        AzureBatchOptions(max_nodes=0, public_ip=False, vm_image="x")
    assert len(error_info.value.errors) == 3


def test_existing_pool_needs_no_creation_options() -> None:
    there = AzureBatchOptions(endpoint="https://a.b.batch.azure.com", image="i", pool="spot")
    assert not there.missing_options
    assert not there.can_create_pool
    assert AzureBatchOptions(image="i").missing_options == [
        "endpoint",
        "account_id",
        "vm_size",
        "identity",
    ]
