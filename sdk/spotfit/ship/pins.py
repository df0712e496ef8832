"""Python and package versions here, compared with there, before a machine is paid for."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from importlib import metadata

import msgspec

from spotfit.core.errors import EnvironmentMismatchError
from spotfit.model.software import Software

_ALWAYS = ("cloudpickle", "numpy", "spotfit", "torch")

_DISTRIBUTIONS = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose distribution has another name. Finding that out by asking all costs 100 ms."""


class Environment(msgspec.Struct, frozen=True):
    """What a pickle depends on, as it is on one machine."""

    python: str
    implementation: str
    platform: str
    packages: dict[str, str] = {}
    """Distribution to version, for what is installed of what was asked."""
    needs: tuple[str, ...] = ()
    """Those of `packages` that the luggage cannot be loaded without."""


def here(packages: Iterable[str] = ()) -> Environment:
    """This process's Python, and the versions of `packages` (by import name) where installed.

    Reads what is written on disk about the packages; imports none of them.
    """
    needs = {distribution_of(package) for package in packages}
    return _environment(needs.union(_ALWAYS), needs)


def distribution_of(package: str) -> str:
    """What to ask a package index for, to get `package`."""
    return _DISTRIBUTIONS.get(package, package).replace("_", "-").lower()


def compare(
    here: Environment, there: Environment, *, bringing: Collection[str] = ()
) -> list[EnvironmentMismatchError]:
    """All that keeps luggage packed `here` from loading `there`; empty when it should.

    A difference in the platform, or in a minor version of a package, breaks nothing. `bringing`
    are distributions that will be installed there first; they are not judged.
    """
    judged = sorted(here.packages.keys() - set(bringing))
    verdicts = [_python_differs(here, there), *(_differs(name, here, there) for name in judged)]
    return [verdict for verdict in verdicts if verdict is not None]


def foresee(there: Software, *, bringing: Collection[str] = ()) -> list[EnvironmentMismatchError]:
    """All that would keep luggage packed here from loading on machines said to run `there`.

    What is not said of them is not judged: a machine compares the rest when it is there.
    """
    ours = _environment(there.packages)
    said = Environment(
        python=there.python or ours.python,
        implementation=there.implementation if there.python else ours.implementation,
        platform=ours.platform,
        packages=there.packages,
    )
    return compare(ours, said, bringing=bringing)


def _environment(distributions: Iterable[str], needs: Collection[str] = ()) -> Environment:
    versions = {name: _version(name) for name in sorted(distributions)}
    installed = {name: version for name, version in versions.items() if version}
    return Environment(
        python=".".join(map(str, sys.version_info[:3])),
        implementation=sys.implementation.name,
        platform=f"{sys.platform}-{os.uname().machine}",
        packages=installed,
        needs=tuple(sorted(installed.keys() & set(needs))),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python_differs(here: Environment, there: Environment) -> EnvironmentMismatchError | None:
    ours, theirs = (f"{e.implementation} {_first(e.python, 2)}" for e in (here, there))
    if ours == theirs:
        return None
    return EnvironmentMismatchError(
        f"Here runs {here.implementation} {here.python}, the machines run {there.implementation} "
        f"{there.python}. A function travels as byte code, which only the same minor version runs.",
        do=f"Choose machines (or an image) with {ours}, or call fit() from {theirs}.",
        here=here.python,
        there=there.python,
    )


def _differs(name: str, here: Environment, there: Environment) -> EnvironmentMismatchError | None:
    ours, theirs = here.packages[name], there.packages.get(name)
    if theirs is None and name not in here.needs:
        return None
    if theirs is not None and _line(name, ours) == _line(name, theirs):
        return None
    return EnvironmentMismatchError(
        f"{name} is {ours} here and {theirs or 'not installed'} there.",
        do=f"Add {name}=={ours.partition('+')[0]} to worker_runtime_env={{'pip': [...]}}, or use "
        "an image that has it.",
        package=name,
        here=ours,
        there=theirs,
    )


def _line(name: str, version: str) -> str:
    """The part of a version within which pickles are understood."""
    # We promise nothing between our own minor versions: agent and door speak one protocol.
    return _first(version, 2 if name == "spotfit" else 1)


def _first(version: str, count: int) -> str:
    return ".".join(version.split(".")[:count])
