"""Dependencies of the user's function are shipped, or named if they cannot be."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import spotfit
from spotfit.core.errors import ShippingError
from spotfit.model.events import FailureCause
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]
CONSTANT = "a constant of the user's module"


def return_constant() -> str:
    """A function of the user's module, which machines cannot import."""
    return CONSTANT


class CallableObject:
    """A class of the same module whose instances are functions."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __call__(self, config: Config) -> str:
        return f"{self.words} and {return_constant()}"


# --- by value -------------------------------------------------------------------------------------


def test_closures_lambdas_partials_and_objects_are_shipped(cloud: LiveTestCloud) -> None:
    inside = {"a": 1}

    def closure() -> Any:
        return inside, return_constant()

    def bound(word: str, config: Config) -> Any:
        return word + config["word"]

    ways: list[tuple[Any, Any]] = [
        (closure, (inside, CONSTANT)),
        (lambda: inside["a"] + 1, 2),
        (functools.partial(bound, "bound"), "bound to it"),
        (CallableObject("said"), f"said and {CONSTANT}"),
        (return_constant, CONSTANT),
    ]
    for number, (fn, expected) in enumerate(ways):
        config = {"word": " to it"}
        assert cloud.fit(fn, name=f"way-{number}", config=config).return_value == expected


def test_function_of_main_and_adjacent_modules_are_shipped(cloud: LiveTestCloud) -> None:
    (cloud.folder / "beside_it.py").write_text("def word():\n    return 'from beside it'\n")
    driver = cloud.driver("""
        import os, sys
        import spotfit
        import beside_it

        GREETING = "hello"

        class Greeter:
            def greet(self):
                return f"{GREETING} {beside_it.word()}"

        def train(config):
            sys.modules.pop("beside_it", None)
            return Greeter().greet(), os.getcwd() == config["cwd"]

        if __name__ == "__main__":
            os.chdir("/")
            print(spotfit.DataParallelTrainer(
                train,
                train_loop_config={"cwd": os.getcwd()},
                run_config=spotfit.RunConfig("run", os.environ["STORAGE"]),
            ).fit().return_value)
    """)
    assert driver.wait() == 0, driver.output
    assert "('hello from beside it', False)" in driver.output


# --- files ----------------------------------------------------------------------------------------


def project(folder: Path, name: str, word: str) -> Path:
    """Create a folder with a module and a text file."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(f"WORD = {word!r}\n")
    (folder / "words.txt").write_text(word)
    return folder


def test_working_directory_is_shipped_completely(cloud: LiveTestCloud) -> None:
    folder = project(cloud.folder / "work", "its_module", "at home")

    def train() -> Any:
        import its_module  # type: ignore[import-not-found]

        return its_module.WORD, Path("words.txt").read_text(), str(Path.cwd())

    word, text, cwd = cloud.fit(train, worker_runtime_env={"working_dir": str(folder)}).return_value
    assert (word, text) == ("at home", "at home")
    assert cwd != str(folder), "the machines work in a copy"


def test_py_modules_are_shipped_and_env_vars_set_before_imports(
    cloud: LiveTestCloud,
) -> None:
    package = project(cloud.folder / "lib" / "a_module", "__init__", "from a package")

    def train() -> Any:
        import a_module  # type: ignore[import-not-found]

        return a_module.WORD, os.environ["FLAVOUR"], os.environ["OMP_NUM_THREADS"]

    environment = {
        "py_modules": [str(package)],
        "env_vars": {"FLAVOUR": "salty", "OMP_NUM_THREADS": "3"},
    }
    result = cloud.fit(train, worker_runtime_env=environment)
    assert result.return_value == ("from a package", "salty", "3")


def test_pip_requirement_is_installed_for_the_run_only(cloud: LiveTestCloud) -> None:
    wheel = write_wheel(cloud.folder)

    def train() -> Any:
        import tiny_spotfit_test  # type: ignore[import-not-found]

        return tiny_spotfit_test.WORD

    environment = {"pip": [f"tiny-spotfit-test @ file://{wheel}"]}
    assert cloud.fit(train, worker_runtime_env=environment).return_value == "installed"
    assert "tiny_spotfit_test" not in sys.modules


def write_wheel(folder: Path) -> Path:
    """Create a minimal package."""
    wheel = folder / "tiny_spotfit_test-1.0-py3-none-any.whl"
    about = "tiny_spotfit_test-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_spotfit_test.py", "WORD = 'installed'\n")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-spotfit-test\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            f"{about}/RECORD",
            f"tiny_spotfit_test.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
        )
    return wheel


def test_failed_installation_is_reported_with_the_output_of_pip(
    cloud: LiveTestCloud,
) -> None:
    environment = {
        "pip": [f"no-such-thing @ file://{cloud.folder}/no-such-thing-1-py3-none-any.whl"]
    }
    with pytest.raises(spotfit.WorkerGroupError, match="could not install no-such-thing"):
        cloud.fit(lambda: None, worker_runtime_env=environment, max_failures=-1)
    assert len(cloud.rounds_opened()) == 1, "a permanent error is not retried"


class Index(BaseHTTPRequestHandler):
    """A package index whose first request fails."""

    wheel: Path
    requested_paths: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.requested_paths.append(self.path)
        if len(self.requested_paths) == 1:
            self.send_error(503)
        elif self.path.endswith(".whl"):
            self._answer(self.wheel.read_bytes())
        else:
            link = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'
            self._answer(f"<!DOCTYPE html><html><body>{link}</body></html>".encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Suppress the access log."""


def test_temporary_failure_of_the_package_index_is_retried(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "0")
    handler = type("Down", (Index,), {"wheel": write_wheel(cloud.folder), "requested_paths": []})

    def train() -> Any:
        import tiny_spotfit_test

        return tiny_spotfit_test.WORD

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        index = f"--index-url http://127.0.0.1:{server.server_port}/simple"
        environment = {"pip": [index, "tiny-spotfit-test"]}
        try:
            result = cloud.fit(train, worker_runtime_env=environment, max_failures=0)
        finally:
            server.shutdown()
            thread.join()
    assert result.return_value == "installed"
    assert cloud.view().failure_counts == {FailureCause.PLATFORM: 1}


# --- objects that cannot be shipped ---------------------------------------------------------------


def test_unpicklable_object_is_named_by_its_path(cold_cloud: LiveTestCloud) -> None:
    holder = {"tools": [1, threading.Lock()]}

    def train() -> Any:
        return holder

    with pytest.raises(ShippingError) as error_info:
        cold_cloud.fit(train)
    assert isinstance(error_info.value, TypeError)
    assert "holder" in error_info.value.message
    assert "'tools'" in error_info.value.message
    assert "lock" in error_info.value.message
    assert cold_cloud.is_untouched


def test_unpicklable_config_is_rejected(cold_cloud: LiveTestCloud) -> None:
    import socket

    with (
        socket.socket() as client_socket,
        pytest.raises(ShippingError, match="train_loop_config") as error_info,
    ):
        cold_cloud.fit(lambda config: None, config={"log": {"socket": client_socket}})
    assert "'socket'" in error_info.value.message
    assert cold_cloud.is_untouched


def test_missing_module_on_the_node_is_named(cloud: LiveTestCloud) -> None:
    (cloud.folder / "unshipped").mkdir()
    (cloud.folder / "unshipped" / "unshipped_module.py").write_text(
        textwrap.dedent("""
            def train(config):
                return "never"
        """)
    )
    sys.path.insert(0, str(cloud.folder / "unshipped"))
    try:
        import unshipped_module  # type: ignore[import-not-found]

        with pytest.raises((spotfit.WorkerGroupError, ShippingError), match="unshipped_module"):
            cloud.fit(unshipped_module.train, max_failures=-1)
    finally:
        sys.path.pop(0)
        sys.modules.pop("unshipped_module", None)
