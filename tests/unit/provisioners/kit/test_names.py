"""Names that every cloud accepts."""

import pytest

from spotfit_provisioners.kit.names import content_name, label


@pytest.mark.parametrize(
    ("text", "safe"),
    [("Digits 1", "digits-1"), ("__x__", "x"), ("ünï", "n"), ("", "x"), ("a" * 70, "a" * 63)],
)
def test_a_label_is_safe(text: str, safe: str) -> None:
    assert label(text) == safe


def test_equal_content_has_one_name_whatever_its_order() -> None:
    assert content_name({"a": 1, "b": 2}) == content_name({"b": 2, "a": 1})
    assert content_name({"a": 1}) != content_name({"a": 2})
    assert len(content_name({}, longest=10)) == 10
