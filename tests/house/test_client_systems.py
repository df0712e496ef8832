"""What runs on laptops needs nothing that Windows or macOS lacks; test_clients.py trains there."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import PROVISIONERS, ROOT, SDK, relative_path
from tests.other_systems import UNIX_MODULES, missing_names, run_python

pytest.importorskip("mypy", reason="its typeshed has the names of each system")

MACHINE_PACKAGES = ("agent", "fork_server", "sidecar", "testing")
"""Packages of the SDK that only run on machines, or are for tests."""
MACHINE_MODULES = (
    *("sdk/spotfit/worker/main.py", "sdk/spotfit/worker/agent_connection.py"),
    *("sdk/spotfit/worker/agent_snapshots.py", "sdk/spotfit/worker/code_setup.py"),
    "sdk/spotfit/worker/session.py",
    *("sdk/spotfit/code/environment_setup.py", "sdk/spotfit/host/event_loop.py"),
    *("sdk/spotfit/host/owned_dirs.py", "sdk/spotfit/host/process.py"),
    *("sdk/spotfit/checkpoint/node_sharing.py", "sdk/spotfit/checkpoint/peer_store.py"),
    "sdk/spotfit/data/caching/cache_directories.py",
    "sdk/spotfit/data/caching/cache_files.py",
    *("sdk/spotfit/data/feeding/feeder_process.py", "sdk/spotfit/data/feeding/processes.py"),
    *("sdk/spotfit/data/feeding/feeder_server.py", "sdk/spotfit/data/feeding/local_feeders.py"),
    "sdk/spotfit/data/feeding/worker_feeders.py",
)
"""Further modules that only machines import."""
LIBRARIES = {"accelerate", "lightgbm", "tensorflow", "transformers", "xgboost"}
"""Training libraries that are not installed here; modules that import them are left out."""
RAISING_MODULES = {"horovod": ("keras", "mxnet", "tensorflow")}
"""Modules that raise when they are imported, by their package."""
UNIX_PROVISIONERS = ("local", "slurm")
GUARDED = {
    "sdk/spotfit/checkpoint/checkpoint_dir.py": {"fcntl", "getuid", "O_CLOEXEC", "pread", "pwrite"},
    "sdk/spotfit/checkpoint/shm_segment.py": {"MAP_POPULATE", "MAP_SHARED", "posix_fallocate"},
    "sdk/spotfit/host/machine.py": {"fcntl", "sched_getaffinity"},
    # The name of a function of Horovod.
    "sdk/spotfit/horovod/torch/__init__.py": {"poll"},
    # In the child of a fork.
    "sdk/spotfit/store/clients.py": {"memfd_create", "register_at_fork"},
}
"""Names that are not reached on Windows, by the module that uses them."""

IMPORT_ALL = """
import importlib, json, sys

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""


def test_client_modules_use_only_guarded_names_of_unix() -> None:
    missing = {name for names in missing_names("win32").values() for name in names}
    found = {
        relative_path(path): names
        for path in client_modules()
        if (names := set(used_names(path)) & (missing | set(UNIX_MODULES)))
    }
    assert found == GUARDED


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import fcntl", {"fcntl"}),
        ("from resource import getrlimit", {"resource"}),
        ("import os\nos.getuid()", {"getuid"}),
        ("from os import getuid", {"getuid"}),
        ("import signal\nx = signal.SIGKILL", {"SIGKILL"}),
        ("import os\nhasattr(os, 'pread')", {"pread"}),
    ],
)
def test_a_name_of_unix_is_found(source: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    missing = {name for names in missing_names("win32").values() for name in names}
    assert set(used_names(tmp_path / "module.py")) & (missing | set(UNIX_MODULES)) == expected


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_client_modules_can_be_imported_on_another_system(system: str, tmp_path: Path) -> None:
    # Those that import torch: tests/live/test_clients.py trains with them in local mode.
    paths = [
        path
        for path in client_modules()
        if not {"deepspeed", "lightning", "torch"}.intersection(path.parts)
        and path.parts[-3:-1] != ("jax", "checkpoint")
        and path.parent.name not in RAISING_MODULES.get(path.parent.parent.name, ())
        and not LIBRARIES & {name.partition(".")[0] for name in used_names(path)}
    ]
    modules = (".".join(path.relative_to(ROOT).with_suffix("").parts[1:]) for path in paths)
    names = [name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")]
    done = run_python(
        system, IMPORT_ALL, json.dumps(names), environment=dict(os.environ), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def client_modules() -> list[Path]:
    """The modules that a client may import, on every system."""
    sdk = [
        path for path in SDK.rglob("*.py") if path.relative_to(SDK).parts[0] not in MACHINE_PACKAGES
    ]
    clouds = [
        path
        for path in PROVISIONERS.rglob("*.py")
        if path.relative_to(PROVISIONERS).parts[0] not in UNIX_PROVISIONERS
    ]
    return sorted(path for path in sdk + clouds if relative_path(path) not in MACHINE_MODULES)


def used_names(path: Path) -> Iterator[str]:
    """Names of modules, attributes and imports, and texts such as the 'pread' of a hasattr()."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (module or "", *(alias.name for alias in names))
            case ast.Attribute(
                value=ast.Name(id="os" | "signal" | "socket" | "mmap" | "select" | "time")
            ):
                yield node.attr
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"), args=[_, ast.Constant(value=str(text)), *_]
            ):
                yield text
