"""Troubles strike as often as they were told to, and each kind for itself."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.clouds.injected_errors import ApiFaults


def test_a_trouble_strikes_as_often_as_it_was_told() -> None:
    troubles = ApiFaults()
    assert not troubles.take("quota")
    troubles.inject("quota", 2)
    assert troubles.is_active("quota")
    assert [troubles.take("quota") for _ in range(3)] == [True, True, False]
    assert not troubles.is_active("quota")


def test_one_kind_leaves_the_others_alone_and_can_be_lifted() -> None:
    troubles = ApiFaults()
    troubles.inject("capacity", 1_000_000)
    assert not troubles.take("permission")
    troubles.inject("capacity", 0)
    assert not troubles.take("capacity")


def test_a_trouble_that_is_none_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quota'"):
        ApiFaults().inject("quotta", 1)


def test_a_right_is_taken_from_everybody_or_from_one_and_given_back() -> None:
    troubles = ApiFaults()
    troubles.deny_permissions(["batch:SubmitJob", "agents s3:GetObject"])
    assert troubles.is_denied("batch:SubmitJob", "any")
    assert troubles.is_denied("s3:GetObject", "agents")
    assert not troubles.is_denied("s3:GetObject", "sim")
    troubles.deny_permissions([])
    assert not troubles.is_denied("batch:SubmitJob")
