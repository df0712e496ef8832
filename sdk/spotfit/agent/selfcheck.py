"""What a machine could do for a run, told without one: `python -m spotfit.agent --check`."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec

from spotfit.agent.net import listen
from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes
from spotfit.host import env, machine
from spotfit.ship import pins

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where data loaders and NCCL pass things on


class Report(msgspec.Struct, frozen=True):
    """A machine as its agent finds it. Printed as JSON; a field is added, never renamed."""

    python: str
    """As 3.11.7."""
    implementation: str
    platform: str
    """As linux-x86_64."""
    packages: dict[str, str]
    """Every distribution that is installed, with its version."""
    user: int
    """Who the agent is; 0 is root."""
    cpus: int
    devices: tuple[str, ...]
    """Accelerators that workers would be given."""
    scratch_bytes: int
    """Free where the agent keeps what passes through."""
    shared_memory_bytes: int
    """Size of /dev/shm; 0 where there is none."""
    complaints: tuple[str, ...] = ()
    """What would keep an agent from serving here; empty when nothing does."""


def report() -> Report:
    """Look at everything an agent needs from its machine, except for a run."""
    mistakes = Mistakes()
    mistakes.check(env.check)
    mistakes.check(_can_listen)
    scratch = mistakes.check(_free_scratch)
    here = pins.here()
    return Report(
        here.python,
        here.implementation,
        here.platform,
        _packages(),
        os.getuid(),
        machine.cpu_count(),
        machine.devices(),
        scratch or 0,
        shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0,
        tuple(dict.fromkeys(map(str, mistakes.found))),
    )


def told(found: Report) -> str:
    """The report as one line of JSON."""
    return msgspec.json.encode(found).decode()


def _packages() -> dict[str, str]:
    installed = {pins.distribution_of(one.name): one.version for one in metadata.distributions()}
    return dict(sorted(installed.items()))


def _free_scratch() -> int:
    """Raises `ConfigError` where nothing can be written."""
    folder = env.value(env.SCRATCH) or tempfile.gettempdir()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"here")
    except OSError as wrong:
        raise ConfigError(
            f"An agent could not write into {folder}: {wrong}.",
            do="Set SPOTFIT_SCRATCH to a directory that this user may fill.",
        ) from wrong
    return shutil.disk_usage(folder).free


def _can_listen() -> None:
    """Raises `ConfigError` where other machines could not call this one's hub."""
    listen(machine.own_address(), env.value(env.PORT)).close()
