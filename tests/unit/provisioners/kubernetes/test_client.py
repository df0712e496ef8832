"""Translation of errors, and how a cluster is selected."""

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
def test_permanent_errors_are_distinguished(
    status: int, message: str, error: type[ProvisionError]
) -> None:
    result = to_provision_error("create a Job", status, message)
    assert type(result) is error
    assert message in str(result)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 0])
def test_transient_errors_are_retryable(status: int) -> None:
    assert to_provision_error("create a Job", status, "x") is None


def test_missing_cluster_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    open_kubernetes_client.cache_clear()
    with pytest.raises(ConfigError, match="No Kubernetes cluster is configured") as error_info:
        open_kubernetes_client("", "", "")
    assert "KUBECONFIG" in error_info.value.do


def test_server_url_needs_no_kubeconfig() -> None:
    assert open_kubernetes_client("http://127.0.0.1:1", "", "").namespace == "default"
    assert open_kubernetes_client("http://127.0.0.1:1", "", "train").namespace == "train"
