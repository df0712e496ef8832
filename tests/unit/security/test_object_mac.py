"""MACs of unencrypted objects."""

from __future__ import annotations

import hmac

import pytest

from spotfit.core.ids import RunId
from spotfit.security.object_mac import ObjectMac, strip_mac
from spotfit.security.run_key import RunKey
from spotfit.testing.builders import RUN_ID, RUN_KEY

MAC = ObjectMac(RUN_KEY)
BODY = MAC.add("a/b", b'{"x": 1}')


def test_a_mac_is_one_line_after_the_content() -> None:
    content, line = BODY.split(b"\n")
    assert content == strip_mac(BODY) == b'{"x": 1}'
    assert line.startswith(b"hmac-sha256 ")
    assert MAC.is_valid("a/b", BODY)


def test_equal_objects_have_equal_macs() -> None:
    assert ObjectMac(RUN_KEY).add("a/b", b'{"x": 1}') == BODY


@pytest.mark.parametrize(
    ("object_key", "body"),
    [
        ("a/c", BODY),
        ("a/b", BODY.replace(b"1}", b"2}")),
        ("a/b", BODY[:-1] + (b"0" if BODY[-1:] != b"0" else b"1")),
        ("a/b", BODY[:-1]),
        ("a/b", BODY + b"\n"),
        ("a/b", strip_mac(BODY)),
        ("a/b", b""),
        ("a/b", BODY + BODY[-77:]),
    ],
    ids=["other key", "content", "mac", "cut", "longer", "no mac", "empty", "two macs"],
)
def test_any_other_object_is_not_valid(object_key: str, body: bytes) -> None:
    assert not MAC.is_valid(object_key, body)


@pytest.mark.parametrize(
    "key", [RunKey(b"x" * 32, RUN_ID), RunKey.from_text(RUN_KEY.to_text(), RunId("f" * 32))]
)
def test_the_mac_of_another_key_or_run_is_not_valid(key: RunKey) -> None:
    assert not ObjectMac(key).is_valid("a/b", BODY)


def test_content_without_a_mac_is_unchanged() -> None:
    assert strip_mac(b'{"x": 1}') == b'{"x": 1}'


def test_a_mac_is_hmac_sha256_of_the_key_and_the_content() -> None:
    """The stored bytes are a format: runs of other versions are read."""
    key = RUN_KEY.derive("object mac")
    expected = hmac.digest(key, b"k\0content", "sha256").hex()
    assert ObjectMac(RUN_KEY).add("k", b"content") == f"content\nhmac-sha256 {expected}".encode()
