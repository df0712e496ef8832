"""Images by the versions in them: which one is taken, and what its name says that it holds.

`worker_image/bake.sh` calls an image REPOSITORY:0.1.0-py3.11-torch2.13.0-cpu. An option that says
REPOSITORY:{spotfit}-py{python}-torch{torch}-cpu is the image made for whoever calls `fit()`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from spotfit.core.errors import ConfigError
from spotfit.host.machine import python_version
from spotfit.model.software import UNKNOWN, Software

_BLANK = re.compile(r"\{([A-Za-z0-9_.-]+)\}")
_PYTHON = re.compile(r"py(3\.\d+(?:\.\d+)?)")
_PACKAGE = re.compile(r"([a-z][a-z_]*)(\d+(?:\.\d+)+)")
_VERSION = re.compile(r"\d+(?:\.\d+)+\w*")


def chosen(image: str) -> str:
    """The image with every `{python}` and `{distribution}` replaced by the version here.

    Python counts by its minor version, packages without their build: '2.13.0' for '2.13.0+cpu'.
    Raises `ConfigError` for a distribution that is not installed here.
    """
    return _BLANK.sub(lambda blank: _version(blank[1], image), image)


def software(image: str) -> Software:
    """What the tag says of Python and packages; nothing where it is no tag of ours."""
    _, _, tag = image.rpartition("/")[2].partition(":")
    parts = tag.partition("@")[0].split("-")
    python = next(filter(None, map(_PYTHON.fullmatch, parts)), None)
    if python is None:
        return UNKNOWN
    return Software(python[1], packages=dict(_packages(parts)))


def _packages(parts: list[str]) -> Mapping[str, str]:
    found = (_PACKAGE.fullmatch(part) for part in parts if not _PYTHON.fullmatch(part))
    told = {one[1].replace("_", "-"): one[2] for one in found if one is not None}
    return {"spotfit": parts[0], **told} if _VERSION.fullmatch(parts[0]) else told


def _version(name: str, image: str) -> str:
    if name == "python":
        return ".".join(python_version().split(".")[:2])
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"image={image!r} depends on the version of {name}, which is not installed here.",
            do=f"Install {name}, or write the version into the image's name.",
        ) from None
