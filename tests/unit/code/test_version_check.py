"""Differences that break a pickle are told; those that do not are not."""

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


def there(**changed: str | None) -> SoftwareEnvironment:
    """The laptop's environment with other versions; None takes a package away."""
    packages = {**LAPTOP.packages, **changed}
    kept = {name: version for name, version in packages.items() if version is not None}
    return msgspec.structs.replace(LAPTOP, packages=kept)


def test_what_is_here_is_read() -> None:
    found = local_environment(["msgspec", "no_such_package"])
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.implementation == "cpython"
    assert found.packages["msgspec"] == metadata.version("msgspec")
    assert found.packages["cloudpickle"] == metadata.version("cloudpickle")
    assert found.required_packages == ("msgspec",)


def test_an_environment_travels_in_the_spec() -> None:
    assert decoder(SoftwareEnvironment).decode(encode(LAPTOP)) == LAPTOP


def test_packages_are_asked_for_under_their_distributions_name() -> None:
    assert distribution_name("sklearn") == "scikit-learn"
    assert distribution_name("Typing_Extensions") == "typing-extensions"


def test_equal_environments_agree() -> None:
    assert compare_environments(LAPTOP, LAPTOP) == []


@pytest.mark.parametrize(
    "python", [{"python": "3.11.2"}, {"platform": "linux-x86_64"}], ids=["patch", "platform"]
)
def test_what_breaks_no_pickle_is_not_told(python: dict[str, str]) -> None:
    assert compare_environments(LAPTOP, msgspec.structs.replace(LAPTOP, **python)) == []


def test_another_minor_version_of_python_is_told() -> None:
    (told,) = compare_environments(LAPTOP, msgspec.structs.replace(LAPTOP, python="3.12.7"))
    assert isinstance(told, EnvironmentMismatchError)
    assert "called from cpython 3.11.7, but the machines run cpython 3.12.7" in told.message
    assert "bytecode" in told.message, "why that matters"
    assert "machines or an image with cpython 3.11, or call fit() from cpython 3.12" in told.do


def test_another_implementation_is_told() -> None:
    (told,) = compare_environments(LAPTOP, msgspec.structs.replace(LAPTOP, implementation="pypy"))
    assert "pypy 3.11" in str(told)


@pytest.mark.parametrize(
    ("name", "version"),
    [("numpy", "1.26.4"), ("cloudpickle", "2.2.1"), ("torch", "1.13.1"), ("spotfit", "0.2.0")],
)
def test_another_line_of_a_package_is_told(name: str, version: str) -> None:
    (told,) = compare_environments(LAPTOP, there(**{name: version}))
    assert f"{name} is {LAPTOP.packages[name]} where fit() was called and {version} on" in str(told)


@pytest.mark.parametrize(
    ("name", "version"), [("numpy", "2.0.1"), ("torch", "2.9.1+cu128"), ("spotfit", "0.1.9")]
)
def test_another_minor_version_of_a_package_is_let_pass(name: str, version: str) -> None:
    assert compare_environments(LAPTOP, there(**{name: version})) == []


def test_a_package_the_luggage_needs_must_be_there() -> None:
    (told,) = compare_environments(LAPTOP, there(pandas=None))
    assert "not installed on the machines" in str(told)
    assert "pandas==2.3.0" in told.do


def test_a_package_nobody_needs_may_be_missing() -> None:
    assert compare_environments(LAPTOP, there(torch=None)) == []


def test_the_remedy_names_a_version_an_index_has() -> None:
    (told,) = compare_environments(LAPTOP, there(torch="1.13.1"))
    assert "torch==2.13.0 " in told.do


def test_what_will_be_installed_there_is_not_judged() -> None:
    assert compare_environments(LAPTOP, there(pandas=None), to_install={"pandas"}) == []


def test_all_differences_are_told_at_once() -> None:
    other = msgspec.structs.replace(there(numpy="1.26.4", pandas=None), python="3.12.0")
    assert len(compare_environments(LAPTOP, other)) == 3


# --- before there is a machine -------------------------------------------------------------------

MINOR = ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize(
    "said",
    [
        Software(),
        Software(python=MINOR),
        Software(python=f"{MINOR}.99"),
        Software(python="", implementation="pypy"),
    ],
)
def test_what_is_not_said_of_machines_to_come_is_not_judged(said: Software) -> None:
    assert predict_mismatches(said) == []


@pytest.mark.parametrize(
    "said",
    [
        Software(python="3.9"),
        Software(python="3.9.1"),
        Software(python=MINOR, implementation="pypy"),
    ],
)
def test_another_python_is_foreseen(said: Software) -> None:
    (told,) = predict_mismatches(said)
    assert f"the machines run {said.implementation} {said.python}" in told.message
    assert told.details == {"here": local_environment().python, "there": said.python}


def test_packages_are_foreseen_as_far_as_they_are_said() -> None:
    ours = metadata.version("msgspec")
    assert predict_mismatches(Software(packages={"msgspec": ours})) == []
    (told,) = predict_mismatches(
        Software(
            packages={"msgspec": "99.0", "cloudpickle": local_environment().packages["cloudpickle"]}
        )
    )
    assert f"msgspec is {ours} where fit() was called and 99.0 on" in told.message


def test_what_is_not_installed_here_is_no_matter_of_ours() -> None:
    assert predict_mismatches(Software(packages={"no-such-package": "1.0"})) == []


def test_what_the_run_brings_is_not_foreseen() -> None:
    assert predict_mismatches(Software(packages={"msgspec": "99.0"}), to_install={"msgspec"}) == []
