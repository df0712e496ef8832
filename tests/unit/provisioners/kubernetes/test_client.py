"""A cluster's complaints in our words, and how one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit_provisioners.kubernetes.client import open_kubernetes_client, to_provision_error

pytest.importorskip("kubernetes")


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (401, "Unauthorized", ProvisionPermissionError),
        (403, "jobs.batch is forbidden", ProvisionPermissionError),
        (403, "exceeded quota: compute", QuotaError),
        (422, "Invalid value", ProvisionError),
    ],
)
def test_what_waiting_does_not_cure_is_told_apart(
    status: int, message: str, error: type[ProvisionError]
) -> None:
    told = to_provision_error("create a Job", status, message)
    assert type(told) is error
    assert message in str(told)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 0])
def test_what_may_pass_is_left_to_be_tried_again(status: int) -> None:
    assert to_provision_error("create a Job", status, "x") is None


def test_without_any_cluster_it_says_where_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    open_kubernetes_client.cache_clear()
    with pytest.raises(ConfigError, match="No Kubernetes cluster is configured") as told:
        open_kubernetes_client("", "", "")
    assert "KUBECONFIG" in told.value.do


def test_an_address_is_enough() -> None:
    assert open_kubernetes_client("http://127.0.0.1:1", "", "").namespace == "default"
    assert open_kubernetes_client("http://127.0.0.1:1", "", "train").namespace == "train"
