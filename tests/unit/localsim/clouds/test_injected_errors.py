"""Injected errors occur as often as configured, for each kind separately."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.testing.builders import ManualClock
from spotfit_localsim.clouds.injected_errors import ApiFaults


def test_fault_occurs_the_configured_number_of_times() -> None:
    faults = ApiFaults()
    assert not faults.take("quota")
    faults.inject("quota", 2)
    assert faults.is_active("quota")
    assert [faults.take("quota") for _ in range(3)] == [True, True, False]
    assert not faults.is_active("quota")


def test_fault_affects_one_kind_and_can_be_removed() -> None:
    faults = ApiFaults()
    faults.inject("capacity", 1_000_000)
    assert not faults.take("permission")
    faults.inject("capacity", 0)
    assert not faults.take("capacity")


def test_unknown_fault_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quota'"):
        ApiFaults().inject("quotta", 1)


def test_permissions_are_denied_to_all_or_one_principal_and_restored() -> None:
    faults = ApiFaults()
    faults.deny_permissions(["batch:SubmitJob", "agents s3:GetObject"])
    assert faults.is_denied("batch:SubmitJob", "any")
    assert faults.is_denied("s3:GetObject", "agents")
    assert not faults.is_denied("s3:GetObject", "sim")
    faults.deny_permissions([])
    assert not faults.is_denied("batch:SubmitJob")


def test_fault_lasts_for_the_configured_time() -> None:
    clock = ManualClock()
    faults = ApiFaults(clock)
    faults.inject("credentials", 0, duration_s=30.0)
    assert [faults.take("credentials") for _ in range(5)] == [True] * 5
    clock.wait(29.0)
    assert faults.is_active("credentials")
    clock.wait(1.0)
    assert not faults.take("credentials")
