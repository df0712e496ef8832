"""Conditional creates are serialized; other requests are not."""

from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from benchmarks.serialized_moto import SerializedMoto


def test_only_conditional_creates_hold_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[bool] = []

    def served(_: Any, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        alone.append(SerializedMoto.create_lock.locked())
        return [b"done"]

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", served)
    moto = SerializedMoto(create_backend_app)
    for requests in ({"HTTP_IF_NONE_MATCH": "*"}, {"HTTP_IF_NONE_MATCH": '"tag"'}, {}):
        assert moto(requests, None) == [b"done"]
    assert alone == [True, False, False]
