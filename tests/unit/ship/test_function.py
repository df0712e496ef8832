"""Functions travel with what is the user's own, and say clearly why they cannot."""

import functools
import importlib
import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from spotfit.core.errors import ConfigError, IntegrityError, ShippingError
from spotfit.ship import function
from spotfit.ship.function import (
    load_pickle,
    name_of,
    own_modules,
    pack_function,
    pickled,
    takes_config,
    unpickled,
)
from spotfit.ship.sign import RunKey
from spotfit.testing.builders import RUN

KEY = RunKey(bytes(range(32)), RUN)


def called_elsewhere(body: bytes) -> str:
    """What the packed function prints in a process that has none of the modules here."""
    call = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())()"
    command = [sys.executable, "-I", "-c", call]
    done = subprocess.run(command, input=body, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package of the user's, on the path."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("SCALE = 3\n")
    (tmp_path / "mine" / "nets.py").write_text(
        "from mine import SCALE\n"
        "class Net:\n"
        "    def forward(self, x):\n"
        "        return x * SCALE\n"
        "def train_loop():\n"
        "    print(Net().forward(14))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "mine.nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# ── how it wants to be called ────────────────────────────────────────────────────────────────────


class Callable0:
    def __call__(self) -> None: ...


class Callable1:
    def __call__(self, config: Any) -> None: ...

    def method(self, config: Any) -> None: ...


def takes_two(a: Any, b: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda: None, False),
        (lambda config: None, True),
        (lambda config=None: None, False),
        (lambda *args: None, True),
        (lambda **kwargs: None, False),
        (lambda config, extra=1: None, True),
        (lambda *, extra=1: None, False),
        (functools.partial(takes_two, 1), True),
        (functools.partial(takes_two, 1, 2), False),
        (functools.partial(takes_two, b=1), True),
        (Callable0(), False),
        (Callable1(), True),
        (Callable1().method, True),
    ],
)
def test_the_config_goes_to_who_requires_it(fn: Callable[..., Any], expected: bool) -> None:
    assert takes_config(fn) is expected


@pytest.mark.parametrize(
    "fn", [takes_two, lambda a, *args: None, lambda *, needed: None, lambda a, *, needed: None]
)
def test_more_than_one_required_argument_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="should take in 0 or 1 required arguments"):
        takes_config(fn)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        takes_config("train")  # type: ignore[arg-type]


def test_what_has_no_signature_is_refused() -> None:
    with pytest.raises(ShippingError, match="does not tell"):
        takes_config(map)


def test_functions_are_known_by_the_name_they_were_given() -> None:
    assert name_of(takes_two) == "takes_two"
    assert name_of(functools.partial(takes_two, 1)) == "takes_two"
    assert name_of(Callable0()) == "Callable0"


# ── there and back ───────────────────────────────────────────────────────────────────────────────


def test_a_lambda_with_a_closure_arrives() -> None:
    base = 40
    assert called_elsewhere(pack_function(lambda: print(base + 2))) == "42"


def test_a_function_of_the_users_own_module_arrives_whole(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    assert called_elsewhere(pack_function(nets.train_loop)) == "42"


def test_a_module_that_is_named_arrives_whole(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    assert called_elsewhere(pack_function(lambda: print(nets.Net().forward(2)))) == "6"


def test_modules_not_to_be_taken_stay_behind(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    assert pack_function(nets.train_loop, by_value_modules=()) == pickle.dumps(
        nets.train_loop, cloudpickle.DEFAULT_PROTOCOL
    )


def test_nothing_stays_registered(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    vars(nets)["lock"] = threading.Lock()
    before = cloudpickle.list_registry_pickle_by_value()
    with pytest.raises(ShippingError):
        pack_function(lambda: nets.lock)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_what_the_user_registered_stays_registered(project: Path) -> None:
    mine = importlib.import_module("mine")
    cloudpickle.register_pickle_by_value(mine)
    try:
        pack_function(lambda: mine.SCALE)
        assert "mine" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(mine)


# ── whose module is it ───────────────────────────────────────────────────────────────────────────


def test_own_modules_lie_in_the_working_directory(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    assert nets in own_modules()
    assert nets not in own_modules(roots=["/nowhere"])


def test_neither_python_nor_packages_nor_we_are_the_users_own() -> None:
    names = {module.__name__.partition(".")[0] for module in own_modules(roots=["/"])}
    assert not names & {"json", "msgspec", "pytest", "spotfit", "__main__"}


def test_a_sibling_folder_with_a_longer_name_is_not_ours(project: Path) -> None:
    nets = importlib.import_module("mine.nets")
    assert nets not in own_modules(roots=[str(project)[:-1]])


def test_strange_things_among_the_modules_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stranger", object())
    monkeypatch.setitem(sys.modules, "nobody", None)
    assert all(isinstance(module, ModuleType) for module in own_modules(roots=["/"]))


def test_a_removed_working_directory_is_no_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert isinstance(own_modules(), tuple)


def test_the_packages_a_pickle_needs_are_noted(project: Path) -> None:
    import msgspec

    nets = importlib.import_module("mine.nets")

    def train_loop() -> Any:
        return msgspec.json.encode(threading.active_count()), nets.SCALE

    noted = pickled(train_loop, told_as={}, by_value_modules=[nets, *own_modules()]).packages
    assert noted == {"msgspec", "cloudpickle"}


# ── what cannot travel ───────────────────────────────────────────────────────────────────────────


def test_the_unpicklable_is_named_by_its_path() -> None:
    cfg = {"lock": threading.Lock()}

    def train_loop() -> Any:
        return cfg

    with pytest.raises(TypeError) as caught:
        pack_function(train_loop)
    assert "train_loop -> closure variable 'cfg' -> ['lock'] -> _thread.lock" in str(caught.value)
    assert "What to do: Make it inside the training function" in str(caught.value)


def test_the_part_to_blame_is_found_among_several() -> None:
    call = {"train_loop": print, "train_loop_config": {"rows": (n for n in [1])}}
    with pytest.raises(ShippingError, match=r"train_loop_config -> \['rows'\] -> generator"):
        pickled(tuple(call.values()), told_as=call, by_value_modules=())


def test_an_error_about_shipping_survives_a_pickle() -> None:
    with pytest.raises(ShippingError) as caught:
        pack_function(threading.Lock().acquire)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_heavy_function_says_what_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "WARN_BYTES", 1000)
    images = b"1" * 4096
    with pytest.warns(UserWarning, match=r"closure variable 'images' \(4.0 KiB\)"):
        pack_function(lambda: images)


def test_a_function_too_heavy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "WARN_BYTES", 1000)
    monkeypatch.setattr(function, "LIMIT_BYTES", 2000)
    images = b"1" * 4096
    with pytest.raises(ShippingError, match=r"closure variable 'images'.* The limit is 2.0 KiB"):
        pack_function(lambda: images)


# ── unpacking ────────────────────────────────────────────────────────────────────────────────────


def test_a_signed_pickle_is_loaded() -> None:
    envelope = KEY.seal(cloudpickle.dumps({"loss": 0.5}), purpose="result")
    assert load_pickle(envelope, KEY, purpose="result") == {"loss": 0.5}


def test_a_tampered_pickle_is_never_loaded(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    envelope = KEY.seal(b"x", purpose="result")[:-1] + pickle.dumps(_Trap(trap))
    with pytest.raises(IntegrityError):
        load_pickle(envelope, KEY, purpose="result")
    assert not trap.exists()


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_module_missing_there_is_named() -> None:
    body = pickle.dumps(Callable0()).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(ShippingError, match="no module 'xxx") as caught:
        unpickled(body, what="training function")
    assert all(word in caught.value.do for word in ("working_dir", "py_modules", "pip"))


def test_a_class_missing_there_points_to_versions() -> None:
    body = pickle.dumps(Callable0()).replace(b"Callable0", b"Callable9")
    with pytest.raises(ShippingError, match=r"AttributeError.*Callable9") as caught:
        unpickled(body, what="training function")
    assert "version" in caught.value.do


def test_two_required_arguments_are_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError):
        takes_config(takes_two)
