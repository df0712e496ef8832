"""Names that every cloud accepts."""

import re

import pytest

from spotfit.core.errors import ConfigError
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.job_fields.names import (
    allocation_labels,
    content_addressed_name,
    to_label,
)
from spotfit_provisioners.kubernetes.options import KubernetesOptions


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


def test_costs_are_allocated_to_run_user_and_project() -> None:
    labels = allocation_labels(
        "spotfit-", run="Digits 1", run_id="0a" * 16, user="Jane.Doe@EXAMPLE.com", project=""
    )
    assert labels == {
        "spotfit-run": "digits-1",
        "spotfit-run-id": "0a" * 16,
        "spotfit-user": "jane-doe-example-com",
    }
    assert allocation_labels("x/", run="", user="", project="P") == {
        "x/run": "run",
        "x/project": "p",
    }


def test_labels_of_costs_are_valid_for_google_cloud() -> None:
    """The strictest cloud: at most 63 of [a-z0-9_-], and a name that begins with a letter."""
    labels = allocation_labels("spotfit-", run="Ü" * 70, user="x" * 70, project="A B/C:D")
    for name, value in labels.items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name)
        assert re.fullmatch(r"[a-z0-9_-]{1,63}", value)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (AwsBatchOptions, "tags"),
        (GcpBatchOptions, "labels"),
        (AzureBatchOptions, "labels"),
        (KubernetesOptions, "labels"),
    ],
)
def test_ordinary_labels_are_accepted(make: type, option: str) -> None:
    assert getattr(make(**{option: {"team": "vision", "cost-center": "1234"}}), option)


@pytest.mark.parametrize(
    ("make", "option", "label", "value", "expected"),
    [
        (AwsBatchOptions, "tags", "aws:team", "x", "reserved"),
        (AwsBatchOptions, "tags", "spotfit:token", "x", "reserved"),
        (AwsBatchOptions, "tags", "t" * 129, "x", "not a valid name"),
        (AwsBatchOptions, "tags", "team", "x" * 257, "has the value"),
        (AwsBatchOptions, "tags", "team", "a&b", "has the value"),
        (GcpBatchOptions, "labels", "Team", "x", "not a valid name"),
        (GcpBatchOptions, "labels", "goog-x", "x", "reserved"),
        (GcpBatchOptions, "labels", "team", "Vision", "has the value"),
        (AzureBatchOptions, "labels", "a/b", "x", "not a valid name"),
        (KubernetesOptions, "labels", "team", "a b", "has the value"),
        (KubernetesOptions, "labels", "-team", "x", "not a valid name"),
        (KubernetesOptions, "labels", "spotfit.dev/run", "x", "reserved"),
    ],
)
def test_labels_that_the_cloud_rejects_are_reported(
    make: type, option: str, label: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make(**{option: {label: value}})
    assert f"{make.__name__}({option}=…)" in str(caught.value)
    assert caught.value.do


def test_too_many_tags_are_reported() -> None:
    with pytest.raises(ConfigError, match="at most 40"):
        AwsBatchOptions(tags={f"t{i}": "x" for i in range(41)})
