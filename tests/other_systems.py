"""A process on Linux without what Windows or macOS lacks, for tests of what runs on laptops.

`hide` removes modules and attributes of the standard library as typeshed has them for the other
system, refuses file operations that Windows refuses, and requires an encoding of every text file.
Third-party packages and modules of the standard library that choose an implementation at import are
imported before that: their ports to other systems are not under test.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = ("os", "signal", "socket", "select", "mmap", "selectors", "time", "shutil")
"""Modules of the standard library that have other names on other systems."""
UNIX_MODULES = (
    *("_posixshmem", "crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline"),
    *("resource", "spwd", "syslog", "termios", "tty"),
)
"""Modules that Windows lacks."""
_IMPORTED_BEFORE = (
    *("asyncio", "concurrent.futures.thread", "ctypes", "multiprocessing.connection", "random"),
    *("subprocess", "tempfile", "urllib.request", "uuid", "zipfile", "http.client"),
    *("boto3", "botocore.session", "cloudpickle", "cryptography.x509", "kubernetes.client"),
    *("kubernetes.config", "msgspec", "obstore.store", "pathspec", "pyarrow.fs", "rich.console"),
    *("rich.traceback", "tenacity", "typer.testing", "fsspec.implementations.memory"),
)
_NOT_IN_FILE_NAMES = re.compile(r'[<>:"\\|?*\x00-\x1f]|[. ]$')


def missing_names(system: str) -> dict[str, list[str]]:
    """Return the names of each of `MODULES` that exist on Linux and not on 'win32' or 'darwin'."""
    return {
        module: sorted(_defined_names(module, "linux") - _defined_names(module, system))
        for module in MODULES
    }


def run_python(
    system: str,
    code: str,
    *arguments: str,
    environment: Mapping[str, str],
    cwd: Path,
    imported_before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run the code in a new process that `hide` has prepared, with `arguments` in `sys.argv`."""
    script = cwd / "program.py"
    script.write_text(code)
    names = {
        "system": system,
        "names": missing_names(system),
        "imported_before": (*_IMPORTED_BEFORE, *imported_before),
    }
    start = (
        "import json, runpy, sys; from tests.other_systems import hide; "
        f"hide(**json.loads(sys.argv.pop(1))); sys.argv[0] = {str(script)!r}; "
        f"sys.path.insert(0, {str(cwd)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", start, json.dumps(names), *arguments],
        capture_output=True,
        # As the process encodes its output.
        encoding=environment.get("PYTHONIOENCODING") or "utf-8",
        timeout=100,
        check=False,
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
    )


def hide(system: str, names: dict[str, list[str]], imported_before: Sequence[str]) -> None:
    """Make this process look like one on 'win32' or 'darwin'; `names` are `missing_names`."""
    for module in imported_before:
        if find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    platform.uname()  # read and cached while os.uname() exists
    for module, attributes in names.items():
        for attribute in attributes:
            vars(sys.modules.get(module) or importlib.import_module(module)).pop(attribute, None)
    # Optimizations that were chosen at import.
    vars(sys.modules["shutil"]).update(
        _USE_CP_SENDFILE=False, _use_fd_functions=False, _copyxattr=lambda *_, **__: None
    )
    # The default is a code page on Windows.
    warnings.filterwarnings("error", category=EncodingWarning, module="spotfit")
    sys.platform = system
    sys.addaudithook(_refuse_linux_files)
    if system == "win32":
        for name in UNIX_MODULES:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, _UnixModulesFinder())
        # WindowsPath cannot be instantiated here.
        os.name, pathlib.Path.__new__ = "nt", _new_posix_path  # type: ignore[method-assign]
        sys.addaudithook(_refuse_file_names)


class _UnixModulesFinder(MetaPathFinder):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> None:
        if name in UNIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _new_posix_path(cls: Any, *args: Any, **_: Any) -> Any:
    posix: Any = pathlib.PosixPath if cls in (pathlib.Path, pathlib.PosixPath) else cls
    if sys.version_info >= (3, 12):
        return object.__new__(posix)
    else:  # noqa: RET505 - mypy skips one of the branches
        return posix._from_parts(args)


def _refuse_linux_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(
        arguments[0], str | os.PathLike
    ):
        path = os.fspath(arguments[0])
        if isinstance(path, str) and path.startswith(("/proc", "/dev/shm", "/sys/")):  # noqa: S108
            raise FileNotFoundError(2, "hidden", path)


def _refuse_file_names(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse names that Windows does not allow, and to rename a file to one that exists."""
    if event == "os.rename" and sys._getframe(1).f_code.co_name == "rename":
        target = os.fspath(arguments[1])
        if os.path.lexists(target):
            raise FileExistsError(17, "the target of rename() exists", target)
    paths = {"open": arguments[:1], "os.mkdir": arguments[:1]}.get(event, ())
    paths = arguments[:2] if event in ("os.rename", "os.link") else paths
    for path in paths:
        name = os.path.basename(path) if isinstance(path, str) else ""  # noqa: PTH119
        if _NOT_IN_FILE_NAMES.search(name) and name not in (".", ".."):
            raise OSError(22, "not a valid file name on Windows", path)


# --- names of the standard library by system, from typeshed ---------------------------------------


def _defined_names(module: str, system: str) -> set[str]:
    import mypy

    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    path = stubs / f"{module}.pyi"
    source = path if path.exists() else stubs / module / "__init__.pyi"
    return set(_names_of(ast.parse(source.read_text()).body, system))


def _names_of(statements: Sequence[ast.stmt], system: str) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.If():
                known = SimpleNamespace(platform=system, version_info=sys.version_info)
                code = compile(ast.Expression(statement.test), "typeshed", "eval")
                holds = eval(code, {"sys": known})  # noqa: S307 - of typeshed
                yield from _names_of(statement.body if holds else statement.orelse, system)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
