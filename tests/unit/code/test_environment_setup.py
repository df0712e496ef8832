"""The runtime environment of a run is prepared once on each node."""

import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spotfit.code import environment_setup as environment_setup
from spotfit.code.archive import archive_directory, archive_key, archive_module
from spotfit.code.environment_setup import (
    PreparedRuntimeEnv,
    pip_install_command,
    prepare_runtime_env,
)
from spotfit.code.runtime_env import PackagedRuntimeEnv
from spotfit.core.errors import InfrastructureError, ShippingError
from spotfit.store.local import MemoryStore


def write_wheel(folder: Path, *, version: str = "1.2") -> None:
    """Write a minimal wheel of the package spotless."""
    info = f"spotless-{version}.dist-info"
    with zipfile.ZipFile(folder / f"spotless-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("spotless.py", f"VERSION = '{version}'\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: spotless\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def env_with_package(folder: Path) -> PackagedRuntimeEnv:
    return PackagedRuntimeEnv(pip=("--no-index", f"--find-links {folder}", "spotless==1.2"))


def output_of_python(python: str, code: str) -> str:
    command = [python, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_empty_runtime_env_changes_nothing(tmp_path: Path) -> None:
    prepared = prepare_runtime_env(PackagedRuntimeEnv(), store=MemoryStore(), scratch_dir=tmp_path)
    assert prepared == PreparedRuntimeEnv(sys.executable, (), None, {})
    assert not list(tmp_path.iterdir())


def test_working_dir_and_py_modules_are_unpacked_and_on_sys_path(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("")
    (tmp_path / "module.py").write_text("")
    working_dir_archive, module_archive = (
        archive_directory(tmp_path / "project"),
        archive_module(tmp_path / "module.py"),
    )
    store = MemoryStore()
    for bundle in (working_dir_archive, module_archive):
        store.create(archive_key(bundle.sha256), bundle.body)
    env = PackagedRuntimeEnv({"A": "1"}, working_dir_archive.sha256, (module_archive.sha256,))
    prepared = prepare_runtime_env(env, store=store, scratch_dir=tmp_path / "scratch")
    assert prepared.cwd is not None
    assert (prepared.cwd / "train.py").exists()
    assert prepared.sys_path[0] == str(prepared.cwd)
    assert (Path(prepared.sys_path[1]) / "module.py").exists()
    assert prepared.env_vars == {"A": "1"}
    assert (
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch") == prepared
    )


def test_packages_are_installed_once_beside_those_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path)
    env = env_with_package(tmp_path)
    python = prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch").python
    program = "import spotless, msgspec, pytest; print(spotless.VERSION)"
    assert output_of_python(python, program) == "1.2"

    monkeypatch.setattr(environment_setup, "_create_virtualenv", raise_if_installed)
    assert (
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch").python
        == python
    )


def raise_if_installed(*_: Any) -> None:
    raise AssertionError("installed twice")


def test_failed_installation_reports_the_output_of_pip_and_is_not_reused(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match=r"(?s)could not install .*No matching distribution"):
        prepare_runtime_env(
            env_with_package(tmp_path), store=MemoryStore(), scratch_dir=tmp_path / "scratch"
        )
    write_wheel(tmp_path)
    prepared = prepare_runtime_env(
        env_with_package(tmp_path), store=MemoryStore(), scratch_dir=tmp_path / "scratch"
    )
    assert output_of_python(prepared.python, "import spotless; print('imported')") == "imported"


def test_pip_is_killed_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_setup, "_PIP_TIMEOUT_S", 0.0)
    with pytest.raises(InfrastructureError, match="timed out after 0 s"):
        prepare_runtime_env(env_with_package(tmp_path), store=MemoryStore(), scratch_dir=tmp_path)


class FakePackageIndex(BaseHTTPRequestHandler):
    """A package index that answers everything with one status."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Log nothing."""


@contextmanager
def package_index(status: int) -> Iterator[str]:
    handler = type("PackageIndexHandler", (FakePackageIndex,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (404, ShippingError),
        (503, InfrastructureError),
        (429, InfrastructureError),
        (None, InfrastructureError),
    ],
    ids=["not found", "unavailable", "rate limited", "unreachable"],
)
def test_unavailable_package_index_is_an_infrastructure_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, error_type: type[Exception]
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "0")
    with package_index(status or 404) as url:
        index = url if status else "http://127.0.0.1:9/simple"
        env = PackagedRuntimeEnv(pip=(f"--index-url {index}", "spotless==1.2"))
        with pytest.raises(error_type, match=r"could not install .*spotless") as raised:
            prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path)
    assert "No matching distribution" in str(raised.value), (
        "the output of pip is the same in all cases"
    )


def test_killed_pip_is_an_infrastructure_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(
        environment_setup, "pip_install_command", lambda *_: [sys.executable, "-c", program]
    )
    with pytest.raises(InfrastructureError, match="exited with code -9"):
        prepare_runtime_env(env_with_package(tmp_path), store=MemoryStore(), scratch_dir=tmp_path)


def test_reported_output_of_pip_contains_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = "https://me:hunter2@packages.example/simple"
    program = f"print('Looking in indexes: {index}'); raise SystemExit(1)"
    monkeypatch.setattr(
        environment_setup, "pip_install_command", lambda *_: [sys.executable, "-c", program]
    )
    env = PackagedRuntimeEnv(pip=(f"--index-url {index}", "spotless==1.2"))
    with pytest.raises(ShippingError) as raised:
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path)
    for text in (str(raised.value), raised.value.details["output"]):
        assert "hunter2" not in text
        assert "//***@packages.example" in text


def test_pip_is_not_interactive() -> None:
    command = pip_install_command("python3", Path("requirements.txt"))
    assert command[:4] == ["python3", "-m", "pip", "install"]
    assert "--no-input" in command
    assert command[-2:] == ["--requirement", "requirements.txt"]
