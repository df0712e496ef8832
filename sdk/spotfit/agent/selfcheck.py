"""Inspection of a machine without a run: `python -m spotfit.agent --check`.

`NodeReport` lists the resources of the machine and the problems that would stop an agent there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec

from spotfit.agent.tls_transport import listen
from spotfit.code import version_check
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.host import env, machine, memory
from spotfit.model.topology import MachineSize


class NodeReport(msgspec.Struct, frozen=True):
    """The resources of a machine. Printed as JSON: fields are added, never renamed."""

    python: str
    """For example 3.11.7."""
    implementation: str
    platform: str
    """For example linux-x86_64."""
    packages: dict[str, str]
    """Installed distributions and their versions."""
    user: int
    """User ID of the agent; 0 is root."""
    cpus: int
    memory_bytes: int
    """The limit of the container if it has one; 0: unknown."""
    devices: tuple[str, ...]
    """Accelerators that are available to workers."""
    scratch_bytes: int
    """Free bytes in the agent's scratch directory (SPOTFIT_SCRATCH)."""
    shared_memory_bytes: int
    """Size of /dev/shm; 0 if it does not exist."""
    instance: str
    """Id of the instance; equal on machines that are containers of one instance. '': unknown."""
    problems: tuple[str, ...] = ()
    """Reasons why an agent could not serve on this machine; empty if it could."""


def inspect_node() -> NodeReport:
    """Check everything that an agent needs from its machine, except for the run itself.

    For `python -m spotfit.agent --check`. Reads environment variables, binds the agent's port and
    writes a temporary file. Failed checks are listed in `NodeReport.problems`, not raised.
    """
    errors = ErrorCollector()
    errors.check(env.check_all)
    # Bound as the agent would, then closed: an address of another machine or a taken port fails.
    errors.check(lambda: listen(machine.own_address(), env.read(env.PORT)).close())
    scratch_bytes = errors.check(_free_scratch_bytes)
    size = measure_size()
    local = version_check.local_environment()
    packages = {
        version_check.distribution_name(package.name): package.version
        for package in metadata.distributions()
    }
    return NodeReport(
        python=local.python,
        implementation=local.implementation,
        platform=local.platform,
        packages=dict(sorted(packages.items())),
        user=os.getuid(),
        cpus=size.cpus,
        memory_bytes=size.memory_bytes,
        devices=machine.devices(),
        scratch_bytes=scratch_bytes or 0,
        shared_memory_bytes=size.shared_memory_bytes,
        instance=machine.instance_id(),
        # An invalid setting is reported by several checks; list it once.
        problems=tuple(dict.fromkeys(map(str, errors.errors))),
    )


def measure_size() -> MachineSize:
    """Return what the processes of this machine may use: in a container its limits."""
    usage, shared = memory.read_memory_usage(), memory.SHARED_MEMORY_DIR
    return MachineSize(
        cpus=machine.cpu_count(),
        memory_bytes=usage.limit_bytes if usage is not None else 0,
        machine_memory_bytes=memory.read_machine_memory() or 0,
        # Data loaders and NCCL exchange data there; containers often limit it to 64 MiB.
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.is_dir() else 0,
        gpus=len(machine.devices()),
    )


def format_report(node_report: NodeReport) -> str:
    """Return the report as one line of JSON, without a line break."""
    return msgspec.json.encode(node_report).decode()


def _free_scratch_bytes() -> int:
    """Return the free bytes. Raises `ConfigError` if the directory cannot be written to."""
    folder = env.read(env.SCRATCH_DIR) or tempfile.gettempdir()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Permission bits do not show a read-only or full file system; a write does.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ConfigError(
            f"The agent cannot write to the scratch directory {folder}: {error}.",
            do="Set SPOTFIT_SCRATCH to a directory that the user of the agent may write to.",
        ) from error
    return shutil.disk_usage(folder).free
