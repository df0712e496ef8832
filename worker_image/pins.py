"""Write constraints/: every version that the images install, from the project's own pins.

`python -m worker_image.pins` writes both files, and `make pins` calls it. For what CUDA adds pip is
asked, which downloads some gigabytes: only where torch is another one than the file was made for.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
CONSTRAINTS = HERE / "constraints"
PROJECT = HERE.parent / "constraints.txt"
EXTRAS = ("torch", "aws", "gcp", "azure", "kubernetes")
"""A framework, and the clouds: agents ask them for new machines."""
PYTHONS = ("3.11", "3.12", "3.13")
CUDA = re.compile(r"(nvidia|cuda|triton)\b")

_HEAD = """\
# Everything that Dockerfile.{kind} installs. Written by worker_image/pins.py from constraints.txt
# and the extras {extras}.
"""


def main() -> None:
    cpu = pinned()
    write("cpu", cpu)
    kept = read("cuda")
    same = kept.get("torch") == cpu["torch"]
    cuda = {name: kept[name] for name in kept if CUDA.match(name)} if same else cuda_of(cpu)
    write("cuda", cpu | cuda)


def pinned() -> dict[str, str]:
    """What an image without CUDA installs beside spotfit, with the project's version of each."""
    project = parse(PROJECT.read_text())
    names = {name for name in needed("spotfit", EXTRAS) if not CUDA.match(name)}
    return {name: project[name] for name in sorted(names - {"spotfit"})}


def read(kind: str) -> dict[str, str]:
    """The pins of an image as they are written down."""
    file = CONSTRAINTS / f"{kind}.txt"
    return parse(file.read_text()) if file.exists() else {}


def text(kind: str, pins: dict[str, str]) -> str:
    """A file of pins."""
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins)]
    return _HEAD.format(kind=kind, extras=", ".join(EXTRAS)) + "".join(lines)


def write(kind: str, pins: dict[str, str]) -> None:
    (CONSTRAINTS / f"{kind}.txt").write_text(text(kind, pins))


def parse(pins: str) -> dict[str, str]:
    """Name to version."""
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def needed(distribution: str, extras: tuple[str, ...]) -> set[str]:
    """All that one needs, and what that needs, on Linux with any Python of ours."""
    found: set[str] = set()
    ahead = [(canonical(distribution), frozenset(extras))]
    seen = set(ahead)
    while ahead:
        name, requirement = ahead.pop()
        found.add(name)
        fresh = set(_requirements(name, requirement)) - seen
        seen |= fresh
        ahead += fresh
    return found


def cuda_of(pins: dict[str, str]) -> dict[str, str]:
    """What torch from PyPI brings with it, as pip resolves it today."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        own_index = ["--isolated", "--index-url", "https://pypi.org/simple"]
        subprocess.run(
            [sys.executable, "-m", "pip", *words, *own_index, f"torch=={pins['torch']}"], check=True
        )
        report_data = json.loads(report.read_text())["install"]
    resolved = {
        canonical(one["metadata"]["name"]): one["metadata"]["version"] for one in report_data
    }
    return {name: version for name, version in resolved.items() if CUDA.match(name)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if any(_holds(requirement, extra) for extra in {"", *extras}):
            yield canonical(requirement.name), frozenset(requirement.extras)


def _holds(requirement: Requirement, extra: str) -> bool:
    """On Linux with some Python of ours; a backport that another Python needs does no harm."""
    if requirement.marker is None:
        return extra == ""
    environment = {
        "extra": extra,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    versions = [{"python_version": one, "python_full_version": f"{one}.0"} for one in PYTHONS]
    return any(requirement.marker.evaluate({**environment, **version}) for version in versions)


if __name__ == "__main__":
    main()
