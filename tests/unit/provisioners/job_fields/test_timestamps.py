"""Times of Google and Azure."""

from __future__ import annotations

import pytest

from spotfit_provisioners.job_fields.timestamps import to_ms


@pytest.mark.parametrize(
    ("timestamp", "ms"),
    [
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T00:00:01.5Z", 1500),
        ("1970-01-01T00:00:01.0399999Z", 1039),
        ("2026-11-26T10:00:00.123456789Z", 1_795_687_200_123),
        ("", None),
        (None, None),
        ("soon", None),
    ],
)
def test_timestamp_in_milliseconds(timestamp: str | None, ms: int | None) -> None:
    assert to_ms(timestamp) == ms
