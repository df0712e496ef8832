"""Credentials on their way to machines: for one bucket, in one variable, shown nowhere."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.store.credentials import as_text, of_environment
from spotfit.store.url import RootUrl

ROOT = RootUrl.parse("s3://bucket/runs?endpoint_url=http://minio:9000")
KEYS = {"access_key_id": "a", "secret_access_key": "b"}


def test_machines_find_what_they_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", as_text(ROOT, KEYS))
    assert of_environment(ROOT.below("run")) == KEYS
    assert of_environment(RootUrl.parse("s3://another?endpoint_url=http://minio:9000")) == {}
    assert of_environment(RootUrl.parse("s3://bucket/runs")) == {}, "the same name elsewhere"


def test_where_nothing_was_given_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTFIT_STORAGE_KEYS", raising=False)
    assert as_text(ROOT, {}) == ""
    assert of_environment(ROOT) == {}


@pytest.mark.parametrize("text", ["{secret", '{"s3://bucket": "secret"}'])
def test_what_cannot_be_read_is_refused_and_not_shown(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_STORAGE_KEYS", text)
    with pytest.raises(ConfigError, match="SPOTFIT_STORAGE_KEYS") as refused:
        of_environment(ROOT)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
