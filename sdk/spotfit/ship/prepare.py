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
from typing import NamedTuple

import msgspec

from spotfit.core.errors import MachineError, ShippingError, SpotfitError
from spotfit.ship.environment import ShippedEnv
from spotfit.ship.unpack import unpacked
from spotfit.store.api import Store

_PIP_PATIENCE_S = 1800.0
_TAIL_LINES = 15
_PIP_LOG = "pip.log"
_ACCESS = re.compile(r"//[^/@\s]+@")
"""User and password in the address of a package index: nobody's business in a log."""
_NOT_OF_THE_REQUIREMENTS = re.compile(
    r"Max retries exceeded|connection error:|timed out|\b429 Client Error"
    r"|\b5\d\d Server Error|\bHTTP error (?:429|5\d\d)|IncompleteRead|Connection reset by peer"
    r"|Name or service not known|Temporary failure in name resolution|Network is unreachable"
    r"|No space left on device|Disk quota exceeded|Read-only file system|Input/output error"
    r"|Too many open files|Cannot allocate memory|Resource temporarily unavailable"
)
"""What pip says where an index or the machine failed; a package that is not there it tells else."""


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
    `IntegrityError` for bundles that are not what was named, `ShippingError` for requirements
    that pip cannot satisfy, `MachineError` and `OSError` where the index, the network or this node
    failed: then the same may go well a moment later.
    """
    code = scratch / "code"
    cwd = unpacked(env.working_dir, store=store, into=code) if env.working_dir else None
    modules = [unpacked(sha256, store=store, into=code) for sha256 in env.py_modules]
    python = _installed(env, scratch / "pip") if env.pip else sys.executable
    folders = [cwd, *modules] if cwd else modules
    return Prepared(python, tuple(map(str, folders)), cwd, env.env_vars)


def pip_install_command(python: str, requirements: Path) -> list[str]:
    """What is run to install a requirements file for `python`; the whole story goes to a log."""
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    log = ["--log", str(requirements.with_name(_PIP_LOG))]
    return [python, "-m", "pip", "install", *quiet, *log, "--requirement", str(requirements)]


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
    if told := _told_by_failing(make):
        raise _failed(MachineError, "make a virtual environment", told, _ROOM)
    _show_our_packages(home)
    requirements = home / "requirements.txt"
    requirements.write_text("\n".join(env.pip) + "\n", encoding="utf-8")
    told = _told_by_failing(pip_install_command(str(python), requirements))
    if not told:
        return
    purpose = f"install {', '.join(env.pip)}"
    if not told.finished or _NOT_OF_THE_REQUIREMENTS.search(told.output + _log_of(requirements)):
        raise _failed(MachineError, purpose, told, _AGAIN)
    raise _failed(ShippingError, purpose, told, _OTHERS)


_ROOM = "See that the node's disk has room."
_AGAIN = (
    "See that the machines reach the package index, and that their disks have room; or put the "
    "packages into the machines' image."
)
_OTHERS = "Correct worker_runtime_env={'pip': ...}, or put the packages into the machines' image."


def _log_of(requirements: Path) -> str:
    """All that pip has done: what it prints keeps quiet about an index that did not answer."""
    log = requirements.with_name(_PIP_LOG)
    return log.read_text(errors="replace") if log.exists() else ""


def _show_our_packages(home: Path) -> None:
    """Let the new environment see this one's packages, which may itself be a virtual one."""
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(home)}))
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sorted(folders)]
    (site / "_below.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Failing(NamedTuple):
    """How a command failed."""

    how: str
    output: str
    finished: bool
    """Whether it came to its own end: was neither killed nor given up."""


def _told_by_failing(command: list[str]) -> _Failing | None:
    """How that command failed; None if it did not."""
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
        return _Failing(f"was not done in {expired.timeout:.0f} s", "", finished=False)
    if done.returncode == 0:
        return None
    output = done.stdout.decode(errors="replace")
    return _Failing(f"ended with {done.returncode}", output, finished=done.returncode > 0)


def _failed(kind: type[SpotfitError], purpose: str, told: _Failing, do: str) -> SpotfitError:
    purpose = _ACCESS.sub("//***@", purpose)
    tail = _ACCESS.sub("//***@", "\n".join(told.output.splitlines()[-_TAIL_LINES:]))
    said = f" Its last lines:\n{tail}" if tail else ""
    return kind(f"This node could not {purpose}: it {told.how}.{said}", do=do, output=tail)
