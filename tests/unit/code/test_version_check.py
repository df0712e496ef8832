"""Version differences that break a pickle are reported; others are accepted."""

import sys
from importlib import metadata

import msgspec
import pytest

from spotfit.code.version_check import (
    SoftwareEnvironment,
    compare_environments,
    distribution_name,
    local_environment,
    predict_mismatches,
)
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import EnvironmentMismatchError
from spotfit.model.group import Software

LAPTOP = SoftwareEnvironment(
    python="3.11.7",
    implementation="cpython",
    platform="darwin-arm64",
    packages={
        "cloudpickle": "3.1.2",
        "numpy": "2.4.6",
        "pandas": "2.3.0",
        "spotfit": "0.1.0",
        "torch": "2.13.0+cpu",
    },
    required_packages=("cloudpickle", "pandas"),
)


def on_machines(**changed: str | None) -> SoftwareEnvironment:
    """The laptop's environment with other versions; None removes a package."""
    packages = {**LAPTOP.packages, **changed}
    packages_left = {name: version for name, version in packages.items() if version is not None}
    return msgspec.structs.replace(LAPTOP, packages=packages_left)


def test_local_environment_is_read() -> None:
    environment = local_environment(["msgspec", "no_such_package"])
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert environment.implementation == "cpython"
    assert environment.packages["msgspec"] == metadata.version("msgspec")
    assert environment.packages["cloudpickle"] == metadata.version("cloudpickle")
    assert environment.required_packages == ("msgspec",)


def test_environment_round_trips() -> None:
    assert decoder(SoftwareEnvironment).decode(encode(LAPTOP)) == LAPTOP


def test_distribution_names_are_normalized() -> None:
    assert distribution_name("sklearn") == "scikit-learn"
    assert distribution_name("Typing_Extensions") == "typing-extensions"


def test_equal_environments_have_no_differences() -> None:
    assert compare_environments(LAPTOP, LAPTOP) == []


@pytest.mark.parametrize(
    "python", [{"python": "3.11.2"}, {"platform": "linux-x86_64"}], ids=["patch", "platform"]
)
def test_patch_version_and_platform_may_differ(python: dict[str, str]) -> None:
    assert compare_environments(LAPTOP, msgspec.structs.replace(LAPTOP, **python)) == []


def test_different_minor_version_of_python_is_reported() -> None:
    (mismatch,) = compare_environments(LAPTOP, msgspec.structs.replace(LAPTOP, python="3.12.7"))
    assert isinstance(mismatch, EnvironmentMismatchError)
    assert "called from cpython 3.11.7, but the machines run cpython 3.12.7" in mismatch.message
    assert "bytecode" in mismatch.message, "the reason is stated"
    assert "machines or an image with cpython 3.11, or call fit() from cpython 3.12" in mismatch.do


def test_different_python_implementation_is_reported() -> None:
    (mismatch,) = compare_environments(
        LAPTOP, msgspec.structs.replace(LAPTOP, implementation="pypy")
    )
    assert "pypy 3.11" in str(mismatch)


@pytest.mark.parametrize(
    ("name", "version"),
    [("numpy", "1.26.4"), ("cloudpickle", "2.2.1"), ("torch", "1.13.1"), ("spotfit", "0.2.0")],
)
def test_incompatible_package_version_is_reported(name: str, version: str) -> None:
    (mismatch,) = compare_environments(LAPTOP, on_machines(**{name: version}))
    assert f"{name} is {LAPTOP.packages[name]} where fit() was called and {version} on" in str(
        mismatch
    )


@pytest.mark.parametrize(
    ("name", "version"), [("numpy", "2.0.1"), ("torch", "2.9.1+cu128"), ("spotfit", "0.1.9")]
)
def test_compatible_package_version_is_accepted(name: str, version: str) -> None:
    assert compare_environments(LAPTOP, on_machines(**{name: version})) == []


def test_missing_required_package_is_reported() -> None:
    (mismatch,) = compare_environments(LAPTOP, on_machines(pandas=None))
    assert "not installed on the machines" in str(mismatch)
    assert "pandas==2.3.0" in mismatch.do


def test_missing_package_that_is_not_required_is_accepted() -> None:
    assert compare_environments(LAPTOP, on_machines(torch=None)) == []


def test_remedy_contains_no_local_version_label() -> None:
    (mismatch,) = compare_environments(LAPTOP, on_machines(torch="1.13.1"))
    assert "torch==2.13.0 " in mismatch.do


def test_package_in_the_runtime_env_is_not_compared() -> None:
    assert compare_environments(LAPTOP, on_machines(pandas=None), to_install={"pandas"}) == []


def test_all_differences_are_reported_together() -> None:
    other = msgspec.structs.replace(on_machines(numpy="1.26.4", pandas=None), python="3.12.0")
    assert len(compare_environments(LAPTOP, other)) == 3


# --- prediction before machines exist ------------------------------------------------------------

MINOR = ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize(
    "software",
    [
        Software(),
        Software(python=MINOR),
        Software(python=f"{MINOR}.99"),
        Software(python="", implementation="pypy"),
    ],
)
def test_unknown_software_of_machines_is_not_compared(software: Software) -> None:
    assert predict_mismatches(software) == []


@pytest.mark.parametrize(
    "software",
    [
        Software(python="3.9"),
        Software(python="3.9.1"),
        Software(python=MINOR, implementation="pypy"),
    ],
)
def test_different_python_version_is_predicted(software: Software) -> None:
    (mismatch,) = predict_mismatches(software)
    assert f"the machines run {software.implementation} {software.python}" in mismatch.message
    assert mismatch.details == {"here": local_environment().python, "there": software.python}


def test_known_packages_of_machines_are_compared() -> None:
    local_version = metadata.version("msgspec")
    assert predict_mismatches(Software(packages={"msgspec": local_version})) == []
    (mismatch,) = predict_mismatches(
        Software(
            packages={"msgspec": "99.0", "cloudpickle": local_environment().packages["cloudpickle"]}
        )
    )
    assert f"msgspec is {local_version} where fit() was called and 99.0 on" in mismatch.message


def test_package_missing_locally_is_not_compared() -> None:
    assert predict_mismatches(Software(packages={"no-such-package": "1.0"})) == []


def test_package_in_the_runtime_env_is_not_predicted() -> None:
    assert predict_mismatches(Software(packages={"msgspec": "99.0"}), to_install={"msgspec"}) == []
