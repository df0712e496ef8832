"""Credentials passed to machines in one variable, never shown."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.store.url import RootUrl, credentials_from_environment, format_credentials

ROOT = RootUrl.parse("s3://bucket/runs?endpoint_url=http://minio:9000")
KEYS = {"access_key_id": "a", "secret_access_key": "b"}


def test_machines_find_the_formatted_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", format_credentials(ROOT, KEYS))
    assert credentials_from_environment(ROOT.join("run")) == KEYS
    assert (
        credentials_from_environment(RootUrl.parse("s3://another?endpoint_url=http://minio:9000"))
        == {}
    )
    assert credentials_from_environment(RootUrl.parse("s3://bucket/runs")) == {}, (
        "the same name elsewhere"
    )


def test_no_credentials_give_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTFIT_STORAGE_KEYS", raising=False)
    assert format_credentials(ROOT, {}) == ""
    assert credentials_from_environment(ROOT) == {}


@pytest.mark.parametrize("text", ["{secret", '{"s3://bucket": "secret"}'])
def test_corrupt_credentials_are_rejected_without_showing_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", text)
    with pytest.raises(ConfigError, match="SPOTFIT_STORAGE_KEYS") as refused:
        credentials_from_environment(ROOT)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
