"""Names that every cloud accepts."""

import pytest

from spotfit_provisioners.job_fields.names import content_addressed_name, to_label


@pytest.mark.parametrize(
    ("text", "safe"),
    [("Digits 1", "digits-1"), ("__x__", "x"), ("ünï", "n"), ("", "x"), ("a" * 70, "a" * 63)],
)
def test_label_contains_only_allowed_characters(text: str, safe: str) -> None:
    assert to_label(text) == safe


def test_name_does_not_depend_on_the_order_of_content() -> None:
    assert content_addressed_name({"a": 1, "b": 2}) == content_addressed_name({"b": 2, "a": 1})
    assert content_addressed_name({"a": 1}) != content_addressed_name({"a": 2})
    assert len(content_addressed_name({}, max_length=10)) == 10
