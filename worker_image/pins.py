"""Write constraints/: the versions that the images install, from the project's pins.

`python -m worker_image.pins` writes both files; `make pins` calls it. pip resolves the packages
that CUDA adds, which downloads gigabytes, only if the version of torch has changed.
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
"""The framework, and the clouds from which agents request machines."""
PYTHONS = ("3.11", "3.12", "3.13")
CUDA = re.compile(r"(nvidia|cuda|triton)\b")

_HEAD = """\
# Everything that Dockerfile.{kind} installs. Written by worker_image/pins.py from constraints.txt
# and the extras {extras}.
"""


def main() -> None:
    cpu = pinned()
    write("cpu", cpu)
    previous = read("cuda")
    same = previous.get("torch") == cpu["torch"]
    cuda = {name: previous[name] for name in previous if CUDA.match(name)} if same else cuda_of(cpu)
    write("cuda", cpu | cuda)


def pinned() -> dict[str, str]:
    """Return the packages of an image without CUDA, except spotfit, with the project's versions."""
    project = parse(PROJECT.read_text())
    names = {name for name in required_distributions("spotfit", EXTRAS) if not CUDA.match(name)}
    return {name: project[name] for name in sorted(names - {"spotfit"})}


def read(kind: str) -> dict[str, str]:
    """Return the pins in the file of an image."""
    file = CONSTRAINTS / f"{kind}.txt"
    return parse(file.read_text()) if file.exists() else {}


def text(kind: str, pins: dict[str, str]) -> str:
    """Return the content of a file of pins."""
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins)]
    return _HEAD.format(kind=kind, extras=", ".join(EXTRAS)) + "".join(lines)


def write(kind: str, pins: dict[str, str]) -> None:
    (CONSTRAINTS / f"{kind}.txt").write_text(text(kind, pins))


def parse(pins: str) -> dict[str, str]:
    """Parse a file of pins: name to version."""
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def required_distributions(distribution: str, extras: tuple[str, ...]) -> set[str]:
    """Return the transitive requirements on Linux, for any of `PYTHONS`."""
    found: set[str] = set()
    queue = [(canonical(distribution), frozenset(extras))]
    seen = set(queue)
    while queue:
        name, requirement = queue.pop()
        found.add(name)
        new = set(_requirements(name, requirement)) - seen
        seen |= new
        queue += new
    return found


def cuda_of(pins: dict[str, str]) -> dict[str, str]:
    """Return the CUDA packages of torch from PyPI, as pip resolves them."""
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
        if any(_applies(requirement, extra) for extra in {"", *extras}):
            yield canonical(requirement.name), frozenset(requirement.extras)


def _applies(requirement: Requirement, extra: str) -> bool:
    """Return whether the marker holds on Linux for any of `PYTHONS`."""
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
