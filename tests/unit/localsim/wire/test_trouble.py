"""Troubles strike as often as they were told to, and each kind for itself."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.wire.trouble import Troubles


def test_a_trouble_strikes_as_often_as_it_was_told() -> None:
    troubles = Troubles()
    assert not troubles.strikes("quota")
    troubles.expect("quota", 2)
    assert troubles.now("quota")
    assert [troubles.strikes("quota") for _ in range(3)] == [True, True, False]
    assert not troubles.now("quota")


def test_one_kind_leaves_the_others_alone_and_can_be_lifted() -> None:
    troubles = Troubles()
    troubles.expect("capacity", 1_000_000)
    assert not troubles.strikes("permission")
    troubles.expect("capacity", 0)
    assert not troubles.strikes("capacity")


def test_a_trouble_that_is_none_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quota'"):
        Troubles().expect("quotta", 1)


def test_a_right_is_taken_from_everybody_or_from_one_and_given_back() -> None:
    troubles = Troubles()
    troubles.forbid(["batch:SubmitJob", "agents s3:GetObject"])
    assert troubles.forbids("batch:SubmitJob", "anybody")
    assert troubles.forbids("s3:GetObject", "agents")
    assert not troubles.forbids("s3:GetObject", "sim")
    troubles.forbid([])
    assert not troubles.forbids("batch:SubmitJob")
