"""Preparation of a `PackagedRuntimeEnv` on a node: code archives and a virtual environment.

Each step is done once per node, also if several processes request it at the same time.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import msgspec

from spotfit.code.archive import ensure_unpacked
from spotfit.code.runtime_env import PackagedRuntimeEnv
from spotfit.core.errors import InfrastructureError, ShippingError, SpotfitError
from spotfit.store.api import Store

# Long enough to download several GiB of CUDA wheels, and to build a package from source.
_PIP_TIMEOUT_S = 1800.0
_TAIL_LINES = 15
_PIP_LOG = "pip.log"
_URL_CREDENTIALS = re.compile(r"//[^/@\s]+@")
"""User and password in the URL of a package index; they must not appear in logs."""
_NODE_OR_INDEX_FAILURE = re.compile(
    r"Max retries exceeded|connection error:|timed out|\b429 Client Error"
    r"|\b5\d\d Server Error|\bHTTP error (?:429|5\d\d)|IncompleteRead|Connection reset by peer"
    r"|Name or service not known|Temporary failure in name resolution|Network is unreachable"
    r"|No space left on device|Disk quota exceeded|Read-only file system|Input/output error"
    r"|Too many open files|Cannot allocate memory|Resource temporarily unavailable"
)
"""pip output that indicates a failure of the package index or of the node, which may be transient.

A requirement that cannot be satisfied produces other messages.
"""


class PreparedRuntimeEnv(msgspec.Struct, frozen=True):
    """How to start a worker in the prepared environment."""

    python: str
    """The current interpreter, or one of a virtual environment that extends its packages."""
    sys_path: tuple[str, ...]
    """Directories to prepend to `sys.path`."""
    cwd: Path | None
    env_vars: dict[str, str]


def prepare_runtime_env(
    env: PackagedRuntimeEnv, *, store: Store, scratch_dir: Path
) -> PreparedRuntimeEnv:
    """Download, unpack and install the environment below `scratch_dir`, a directory of this node.

    Returns what a process must apply; changes nothing in the calling one. Called on nodes, by
    agents and by the processes that load the user's code. Idempotent, and safe to call from several
    processes at once: one installs, the others wait. Blocks, for pip at most 30 minutes. Raises
    `IntegrityError` for a modified archive, `ShippingError` for requirements that pip cannot
    satisfy, `StoreError` if an archive cannot be downloaded, and `InfrastructureError` or `OSError`
    for failures of the index, the network or the node, which may be transient.
    """
    code = scratch_dir / "code"
    cwd = ensure_unpacked(env.working_dir, store=store, directory=code) if env.working_dir else None
    modules = [ensure_unpacked(sha256, store=store, directory=code) for sha256 in env.py_modules]
    python = _ensure_virtualenv(env, scratch_dir / "pip") if env.pip else sys.executable
    # working_dir first, as the script's directory has precedence in a local run.
    folders = [cwd, *modules] if cwd else modules
    return PreparedRuntimeEnv(
        python=python, sys_path=tuple(map(str, folders)), cwd=cwd, env_vars=env.env_vars
    )


def pip_install_command(python: str, requirements: Path) -> list[str]:
    """Return the pip command that installs a requirements file for the interpreter `python`.

    Does not run it. pip writes its complete log to `pip.log` beside the file.
    """
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    log = ["--log", str(requirements.with_name(_PIP_LOG))]
    return [python, "-m", "pip", "install", *quiet, *log, "--requirement", str(requirements)]


def _ensure_virtualenv(env: PackagedRuntimeEnv, folder: Path) -> str:
    """Return the interpreter of a virtual environment with the requirements; create it once."""
    major, minor = sys.version_info[:2]
    # Named by requirements and Python version, so that runs with equal ones share it on a node.
    home = folder / f"{env.pip_digest[:32]}-{major}.{minor}"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{home.name}.lock").open("w") as lock:
            # The kernel releases the lock when its process dies, so a lock file is never stale.
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Checked again: another process may have created it while this one waited.
            if not ready.exists():
                _create_virtualenv(env, home, python)
                ready.touch()  # last: a directory without this file is incomplete
    return str(python)


def _create_virtualenv(env: PackagedRuntimeEnv, home: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)  # left incomplete by a process that was killed
    # --without-pip: the parent's pip is importable and need not be installed again, which is slow.
    create = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(home)]
    if failure := _run_command(create):
        purpose = "create a virtual environment"
        raise _preparation_error(
            InfrastructureError, purpose=purpose, failure=failure, do=_REMEDY_DISK_SPACE
        )
    _link_parent_packages(home)
    requirements = home / "requirements.txt"
    requirements.write_text("\n".join(env.pip) + "\n", encoding="utf-8")
    failure = _run_command(pip_install_command(str(python), requirements))
    if not failure:
        return
    purpose = f"install {', '.join(env.pip)}"
    # pip's console output does not mention an index that did not answer; its log does.
    log = requirements.with_name(_PIP_LOG)
    output = failure.output + (log.read_text(errors="replace") if log.exists() else "")
    if not failure.has_exited or _NODE_OR_INDEX_FAILURE.search(output):
        raise _preparation_error(
            InfrastructureError, purpose=purpose, failure=failure, do=_REMEDY_PACKAGE_INDEX
        )
    raise _preparation_error(
        ShippingError, purpose=purpose, failure=failure, do=_REMEDY_REQUIREMENTS
    )


_REMEDY_DISK_SPACE = "Check that the node's disk has free space."
_REMEDY_PACKAGE_INDEX = (
    "Check that the machines can reach the package index and that their disks have free space; or "
    "add the packages to the machines' image."
)
_REMEDY_REQUIREMENTS = (
    "Correct worker_runtime_env={'pip': ...}, or add the packages to the machines' image."
)


def _link_parent_packages(home: Path) -> None:
    """Make the packages of the current environment importable in the new one.

    `--system-site-packages` alone skips them if the current environment is a virtual one itself.
    """
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(home)}))
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sorted(folders)]
    (site / "_below.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


class _CommandFailure(NamedTuple):
    description: str
    output: str
    has_exited: bool
    """False if the command was killed or timed out."""


def _run_command(command: list[str]) -> _CommandFailure | None:
    """Run the command and return its failure, or None."""
    try:
        done = subprocess.run(  # noqa: S603 - our own command; requirements come in a file
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return _CommandFailure(f"timed out after {expired.timeout:.0f} s", "", has_exited=False)
    if done.returncode == 0:
        return None
    output = done.stdout.decode(errors="replace")
    return _CommandFailure(
        f"exited with code {done.returncode}", output, has_exited=done.returncode > 0
    )


def _preparation_error(
    error_class: type[SpotfitError], *, purpose: str, failure: _CommandFailure, do: str
) -> SpotfitError:
    purpose = _URL_CREDENTIALS.sub("//***@", purpose)
    tail = _URL_CREDENTIALS.sub("//***@", "\n".join(failure.output.splitlines()[-_TAIL_LINES:]))
    excerpt = f" Its last lines:\n{tail}" if tail else ""
    return error_class(
        f"This node could not {purpose}: the command {failure.description}.{excerpt}",
        do=do,
        output=tail,
    )
