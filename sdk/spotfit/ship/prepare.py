"""On a node: carry out a `ShippedEnv`. Once per node, however many processes ask."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from spotfit.core.errors import ShippingError
from spotfit.ship.environment import ShippedEnv
from spotfit.ship.unpack import unpacked
from spotfit.store.api import Store

_PIP_PATIENCE_S = 1800.0
_TAIL_LINES = 15
_ACCESS = re.compile(r"//[^/@\s]+@")
"""User and password in the address of a package index: nobody's business in a log."""


class Prepared(msgspec.Struct, frozen=True):
    """How to start a worker so that it finds everything."""

    python: str
    """The interpreter: this one, or one with the wanted packages on top of this one's."""
    sys_path: tuple[str, ...]
    """Goes to the front of `sys.path`."""
    cwd: Path | None
    env_vars: dict[str, str]


def prepare(env: ShippedEnv, *, store: Store, scratch: Path) -> Prepared:
    """Fetch, unpack and install below `scratch`, a directory of this node.

    May be called again and by several processes at once; what is there is used. Raises
    `IntegrityError` for bundles that are not what was signed, `ShippingError` when pip fails.
    """
    code = scratch / "code"
    cwd = unpacked(env.working_dir, store=store, into=code) if env.working_dir else None
    modules = [unpacked(sha256, store=store, into=code) for sha256 in env.py_modules]
    python = _installed(env, scratch / "pip") if env.pip else sys.executable
    folders = [cwd, *modules] if cwd else modules
    return Prepared(python, tuple(map(str, folders)), cwd, env.env_vars)


def pip_install_command(python: str, requirements: Path) -> list[str]:
    """What is run to install a requirements file for `python`."""
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    return [python, "-m", "pip", "install", *quiet, "--requirement", str(requirements)]


def _installed(env: ShippedEnv, folder: Path) -> str:
    """The Python of a virtual environment that has the requirements, made at most once."""
    major, minor = sys.version_info[:2]
    home = folder / f"{env.pip_id[:32]}-{major}.{minor}"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{home.name}.lock"):
            if not ready.exists():
                _install(env, home, python)
                ready.touch()
    return str(python)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; a dead one's lock is gone with it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(env: ShippedEnv, home: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)  # what somebody left who died halfway
    make = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(home)]
    _run(make, "make a virtual environment", do="See that the node's disk has room.")
    _show_our_packages(home)
    requirements = home / "requirements.txt"
    requirements.write_text("\n".join(env.pip) + "\n", encoding="utf-8")
    _run(
        pip_install_command(str(python), requirements),
        f"install {', '.join(env.pip)}",
        do="Correct worker_runtime_env={'pip': ...}, or put the packages into the machines' image.",
    )


def _show_our_packages(home: Path) -> None:
    """Let the new environment see this one's packages, which may itself be a virtual one."""
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(home)}))
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sorted(folders)]
    (site / "_below.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(command: list[str], purpose: str, *, do: str) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - our own command; requirements come in a file
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PIP_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise _failed(purpose, f"was not done in {expired.timeout:.0f} s", b"", do) from expired
    if done.returncode != 0:
        raise _failed(purpose, f"ended with {done.returncode}", done.stdout, do)


def _failed(purpose: str, how: str, output: bytes, do: str) -> ShippingError:
    purpose = _ACCESS.sub("//***@", purpose)
    tail = "\n".join(output.decode(errors="replace").splitlines()[-_TAIL_LINES:])
    tail = _ACCESS.sub("//***@", tail)
    said = f" Its last lines:\n{tail}" if tail else ""
    return ShippingError(f"This node could not {purpose}: it {how}.{said}", do=do, output=tail)
