"""A node gets what the run wants around its function, once."""

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

from spotfit.code import environment_setup as preparing
from spotfit.code.archive import archive_directory, archive_key, archive_module
from spotfit.code.environment_setup import (
    PreparedRuntimeEnv,
    pip_install_command,
    prepare_runtime_env,
)
from spotfit.code.runtime_env import PackagedRuntimeEnv
from spotfit.core.errors import InfrastructureError, ShippingError
from spotfit.store.local import MemoryStore


def wheel(folder: Path, *, version: str = "1.2") -> None:
    """The smallest package that pip installs."""
    info = f"spotless-{version}.dist-info"
    with zipfile.ZipFile(folder / f"spotless-{version}-py3-none-any.whl", "w") as packed:
        packed.writestr("spotless.py", f"VERSION = '{version}'\n")
        packed.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: spotless\nVersion: {version}\n"
        )
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", "")


def wanting(folder: Path) -> PackagedRuntimeEnv:
    return PackagedRuntimeEnv(pip=("--no-index", f"--find-links {folder}", "spotless==1.2"))


def said_by(python: str, code: str) -> str:
    command = [python, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_wanted_changes_nothing(tmp_path: Path) -> None:
    prepared = prepare_runtime_env(PackagedRuntimeEnv(), store=MemoryStore(), scratch_dir=tmp_path)
    assert prepared == PreparedRuntimeEnv(sys.executable, (), None, {})
    assert not list(tmp_path.iterdir())


def test_code_is_unpacked_and_found_in_order(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    work, mine = archive_directory(tmp_path / "work"), archive_module(tmp_path / "mine.py")
    store = MemoryStore()
    for bundle in (work, mine):
        store.create(archive_key(bundle.sha256), bundle.body)
    env = PackagedRuntimeEnv({"A": "1"}, work.sha256, (mine.sha256,))
    prepared = prepare_runtime_env(env, store=store, scratch_dir=tmp_path / "scratch")
    assert prepared.cwd is not None
    assert (prepared.cwd / "train.py").exists()
    assert prepared.sys_path[0] == str(prepared.cwd)
    assert (Path(prepared.sys_path[1]) / "mine.py").exists()
    assert prepared.env_vars == {"A": "1"}
    assert (
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch") == prepared
    )


def test_packages_are_installed_on_top_of_ours_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path)
    env = wanting(tmp_path)
    python = prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch").python
    seen = "import spotless, msgspec, pytest; print(spotless.VERSION)"
    assert said_by(python, seen) == "1.2"

    monkeypatch.setattr(preparing, "_create_virtualenv", _never)
    assert (
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path / "scratch").python
        == python
    )


def _never(*_: Any) -> None:
    raise AssertionError("installed twice")


def test_what_pip_says_is_told_and_the_next_try_begins_afresh(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match=r"(?s)could not install .*No matching distribution"):
        prepare_runtime_env(
            wanting(tmp_path), store=MemoryStore(), scratch_dir=tmp_path / "scratch"
        )
    wheel(tmp_path)
    prepared = prepare_runtime_env(
        wanting(tmp_path), store=MemoryStore(), scratch_dir=tmp_path / "scratch"
    )
    assert said_by(prepared.python, "import spotless; print('here')") == "here"


def test_a_pip_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_PIP_TIMEOUT_S", 0.0)
    with pytest.raises(InfrastructureError, match="timed out after 0 s"):
        prepare_runtime_env(wanting(tmp_path), store=MemoryStore(), scratch_dir=tmp_path)


class Index(BaseHTTPRequestHandler):
    """A package index that answers everything with one status."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""


@contextmanager
def an_index(status: int) -> Iterator[str]:
    handler = type("Answers", (Index,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "whose"),
    [
        (404, ShippingError),
        (503, InfrastructureError),
        (429, InfrastructureError),
        (None, InfrastructureError),
    ],
    ids=["it has none", "it is down", "it is asked too often", "nobody listens"],
)
def test_an_index_that_does_not_answer_is_no_mistake_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, whose: type[Exception]
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "0")
    with an_index(status or 404) as url:
        index = url if status else "http://127.0.0.1:9/simple"
        env = PackagedRuntimeEnv(pip=(f"--index-url {index}", "spotless==1.2"))
        with pytest.raises(whose, match=r"could not install .*spotless") as told:
            prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path)
    assert "No matching distribution" in str(told.value), "pip says the same of all of them"


def test_a_pip_that_was_killed_is_no_mistake_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suicide = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(
        preparing, "pip_install_command", lambda *_: [sys.executable, "-c", suicide]
    )
    with pytest.raises(InfrastructureError, match="exited with code -9"):
        prepare_runtime_env(wanting(tmp_path), store=MemoryStore(), scratch_dir=tmp_path)


def test_what_pip_says_tells_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = "https://me:hunter2@packages.example/simple"
    says = f"print('Looking in indexes: {index}'); raise SystemExit(1)"
    monkeypatch.setattr(preparing, "pip_install_command", lambda *_: [sys.executable, "-c", says])
    env = PackagedRuntimeEnv(pip=(f"--index-url {index}", "spotless==1.2"))
    with pytest.raises(ShippingError) as refused:
        prepare_runtime_env(env, store=MemoryStore(), scratch_dir=tmp_path)
    for told in (str(refused.value), refused.value.details["output"]):
        assert "hunter2" not in told
        assert "//***@packages.example" in told


def test_pip_asks_nobody_anything() -> None:
    command = pip_install_command("python3", Path("requirements.txt"))
    assert command[:4] == ["python3", "-m", "pip", "install"]
    assert "--no-input" in command
    assert command[-2:] == ["--requirement", "requirements.txt"]
