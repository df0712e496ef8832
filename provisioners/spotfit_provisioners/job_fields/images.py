"""Container image names that contain versions: filling in placeholders, and parsing tags.

`worker_image/bake.sh` names an image REPOSITORY:0.1.0-py3.11-torch2.13.0-cpu. The option
REPOSITORY:{spotfit}-py{python}-torch{torch}-cpu selects the image for the caller's versions.
"""

from __future__ import annotations

import re
from importlib import metadata

from spotfit.core.errors import ConfigError
from spotfit.host.machine import python_version
from spotfit.model.group import UNKNOWN_SOFTWARE, Software

_PLACEHOLDER = re.compile(r"\{([A-Za-z0-9_.-]+)\}")
_PYTHON = re.compile(r"py(3\.\d+(?:\.\d+)?)")
_PACKAGE = re.compile(r"([a-z][a-z_]*)(\d+(?:\.\d+)+)")
_VERSION = re.compile(r"\d+(?:\.\d+)+\w*")


def resolve_image(image: str) -> str:
    """Replace `{python}` and `{distribution}` in the image name by the installed versions.

    The version of Python is the minor version, and those of packages omit the build: '2.13.0' for
    '2.13.0+cpu'. Raises `ConfigError` for a distribution that is not installed.
    """
    return _PLACEHOLDER.sub(lambda match: _installed_version(match[1], image), image)


def parse_image_software(image: str) -> Software:
    """Return the versions that the image tag names; `UNKNOWN_SOFTWARE` for other tags."""
    # After the last '/': a registry's address may contain a port.
    _, _, tag = image.rpartition("/")[2].partition(":")
    parts = tag.partition("@")[0].split("-")
    python = next(filter(None, map(_PYTHON.fullmatch, parts)), None)
    if python is None:
        return UNKNOWN_SOFTWARE
    matches = (_PACKAGE.fullmatch(part) for part in parts if not _PYTHON.fullmatch(part))
    versions = {match[1].replace("_", "-"): match[2] for match in matches if match is not None}
    # The version of spotfit is the first part, and has no package name in front of it.
    if _VERSION.fullmatch(parts[0]):
        versions = {"spotfit": parts[0], **versions}
    return Software(python=python[1], packages=versions)


def is_cuda_image(image: str) -> bool:
    """Return whether the tag names an image of `worker_image/bake.sh cuda`."""
    return "cuda" in _tag_parts(image)


def is_cpu_image(image: str) -> bool:
    """Return whether the tag names an image of `worker_image/bake.sh cpu`."""
    return "cpu" in _tag_parts(image)


def _tag_parts(image: str) -> list[str]:
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag.partition("@")[0].split("-")


def _installed_version(name: str, image: str) -> str:
    if name == "python":
        # Images of one minor version are compatible: pickled bytecode depends on it only.
        return ".".join(python_version().split(".")[:2])
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"The option image={image!r} of the provisioner contains the version of {name}, which "
            "is not installed where fit() is called.",
            do=f"Install {name}, or write the version into the image name.",
        ) from None
