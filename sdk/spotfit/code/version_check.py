"""Comparison of the caller's Python and package versions with those of the machines.

`predict_mismatches` runs before a machine is rented, from what its image is known to contain;
`compare_environments` runs on the machine.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib import metadata

import msgspec

from spotfit.core.errors import EnvironmentMismatchError, MissingExtraError
from spotfit.model.group import Software

# Compared even if the pickle does not refer to them: tensors, arrays and the protocols of spotfit
# depend on their versions.
_ALWAYS_COMPARED = ("cloudpickle", "numpy", "spotfit", "torch")

_DISTRIBUTION_NAMES = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose distribution has another name. Reading the metadata of all takes 100 ms."""


class SoftwareEnvironment(msgspec.Struct, frozen=True):
    """The interpreter and package versions of one machine, on which loading a pickle depends."""

    python: str
    implementation: str
    platform: str
    packages: dict[str, str] = {}
    """Versions by distribution, for the queried distributions that are installed."""
    required_packages: tuple[str, ...] = ()
    """Distributions in `packages` without which the code bundle cannot be loaded."""


def local_environment(packages: Iterable[str] = ()) -> SoftwareEnvironment:
    """Return the Python version and the installed versions of packages of this machine.

    Of the distributions of `packages` (import names such as `"sklearn"`), and of torch, numpy,
    cloudpickle and spotfit; those not installed are left out. Reads package metadata and imports
    none of the packages.
    """
    required = {distribution_name(package) for package in packages}
    return _describe_environment(required.union(_ALWAYS_COMPARED), required)


def distribution_name(package: str) -> str:
    """Return the name of the distribution that provides a top-level package.

    For example `"scikit-learn"` for `"sklearn"`. A table has the known exceptions; other names are
    only lowercased, with '-' instead of '_'. Nothing is looked up.
    """
    return _DISTRIBUTION_NAMES.get(package, package).replace("_", "-").lower()


def compare_environments(
    source: SoftwareEnvironment, target: SoftwareEnvironment, *, to_install: Collection[str] = ()
) -> list[EnvironmentMismatchError]:
    """Return the differences that prevent loading a code bundle of `source` on `target`.

    `source` is the machine that calls `fit()`, `target` a machine of the run. The errors are
    returned, not raised; empty if there are none. Different platforms and minor versions of
    packages are compatible, except of Python and spotfit. Distributions `to_install` are not
    compared, because they are installed on the target before loading.
    """
    mismatches = []
    # Functions are pickled as bytecode, which changes with every minor version of Python.
    here, there = (f"{e.implementation} {_version_prefix(e.python, 2)}" for e in (source, target))
    if here != there:
        mismatches.append(
            EnvironmentMismatchError(
                f"fit() was called from {source.implementation} {source.python}, but the machines "
                f"run {target.implementation} {target.python}. Functions are pickled as bytecode, "
                "which needs the same minor version.",
                do=f"Choose machines or an image with {here}, or call fit() from {there}.",
                here=source.python,
                there=target.python,
            )
        )
    compared = sorted(source.packages.keys() - set(to_install))
    packages = (_package_mismatch(name, source, target) for name in compared)
    return [*mismatches, *filter(None, packages)]


def predict_mismatches(
    target: Software, *, to_install: Collection[str] = ()
) -> list[EnvironmentMismatchError]:
    """Return the known differences between this environment and machines that run `target`.

    `fit()` calls it before machines are rented, with what the provisioner declares about their
    image. The errors are returned, not raised; empty if there are none. Versions that `target`
    leaves open are not compared here, but later by the machines; the distributions `to_install` are
    never compared.
    """
    source = _describe_environment(target.packages)
    declared = SoftwareEnvironment(
        python=target.python or source.python,
        implementation=target.implementation if target.python else source.implementation,
        platform=source.platform,
        packages=target.packages,
    )
    return compare_environments(source, declared, to_install=to_install)


def check_installed(modules: Iterable[str], *, to_install: Collection[str] = ()) -> None:
    """Raise `MissingExtraError` if one of these top-level modules is not installed here.

    For machines that run in the environment of the caller, where the distributions `to_install` are
    installed as well. Imports none of the modules.
    """
    for module in modules:
        name = distribution_name(module)
        if name in to_install or importlib.util.find_spec(module) is not None:
            continue
        raise MissingExtraError(
            f"The trainer needs the package {name} on the machines, which run in this Python "
            "environment and do not have it.",
            do=f"Run `pip install {name}`, or add it to RunConfig(worker_runtime_env="
            f"{{'pip': ['{name}']}}).",
            module=module,
        )


def _describe_environment(
    distributions: Iterable[str], required: Collection[str] = ()
) -> SoftwareEnvironment:
    installed = {}
    for name in sorted(distributions):
        with suppress(metadata.PackageNotFoundError):
            if version := metadata.version(name):  # None if the metadata is damaged
                installed[name] = version
    return SoftwareEnvironment(
        python=".".join(map(str, sys.version_info[:3])),
        implementation=sys.implementation.name,
        platform=f"{sys.platform}-{platform.machine()}",
        packages=installed,
        required_packages=tuple(sorted(installed.keys() & set(required))),
    )


def _package_mismatch(
    name: str, source: SoftwareEnvironment, target: SoftwareEnvironment
) -> EnvironmentMismatchError | None:
    here, there = source.packages[name], target.packages.get(name)
    # A package that the code bundle does not need may be missing, but not differ.
    if there is None and name not in source.required_packages:
        return None
    if there is not None and _compatible_version(name, here) == _compatible_version(name, there):
        return None
    return EnvironmentMismatchError(
        f"{name} is {here} where fit() was called and {there or 'not installed'} on the machines.",
        # Without the local version ('+cpu'), which package indexes do not have.
        do=f"Add {name}=={here.partition('+')[0]} to worker_runtime_env={{'pip': [...]}}, or use "
        "an image that contains it.",
        package=name,
        here=here,
        there=there,
    )


def _compatible_version(name: str, version: str) -> str:
    """Return the part of a version that has to be equal for pickles to be compatible."""
    # spotfit's protocols may change between its own minor versions; others break major ones only.
    return _version_prefix(version, 2 if name == "spotfit" else 1)


def _version_prefix(version: str, count: int) -> str:
    return ".".join(version.split(".")[:count])
