"""Functions are pickled with the code of the user's project; failures name the reason."""

import dataclasses
import functools
import importlib
import importlib.util
import ntpath
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path, PureWindowsPath
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from spotfit.code import function_pickle
from spotfit.code.function_pickle import (
    device_tensor_error,
    function_name,
    load_sealed_pickle,
    pickle_object,
    project_modules,
    takes_config,
    unpickle,
)
from spotfit.core.errors import ConfigError, ConfigTypeError, IntegrityError, ShippingError
from spotfit.security.run_key import RunKey
from spotfit.testing.builders import RUN_ID

THIS_MODULE = sys.modules[__name__]
KEY = RunKey(bytes(range(32)), RUN_ID)


def pickle_function(
    fn: Callable[..., Any], *, by_value_modules: Iterable[ModuleType] | None = None
) -> bytes:
    modules = project_modules() if by_value_modules is None else by_value_modules
    return pickle_object(fn, labeled_parts={function_name(fn): fn}, by_value_modules=modules).body


def output_of(body: bytes) -> str:
    """Return what the pickled function prints in a process without the modules of this one."""
    call = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())()"
    command = [sys.executable, "-I", "-c", call]
    done = subprocess.run(command, input=body, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package, on the import path."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text("SCALE = 3\n")
    (tmp_path / "project" / "nets.py").write_text(
        "from project import SCALE\n"
        "class Net:\n"
        "    def forward(self, x):\n"
        "        return x * SCALE\n"
        "def train_loop():\n"
        "    print(Net().forward(14))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("project", "project.nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# ── config parameter ──────────────────────────────────────────


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
def test_a_required_parameter_takes_the_config(fn: Callable[..., Any], expected: bool) -> None:
    assert takes_config(fn) is expected


@pytest.mark.parametrize(
    "fn", [takes_two, lambda a, *args: None, lambda *, needed: None, lambda a, *, needed: None]
)
def test_more_than_one_required_argument_is_rejected(fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="should take in 0 or 1 required arguments"):
        takes_config(fn)


def test_an_object_that_is_not_callable_is_rejected() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        takes_config("train")  # type: ignore[arg-type]


class WithoutSignature:
    """A callable like some of extension modules; which ones have none depends on the Python."""

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature found")

    def __call__(self) -> None: ...


def test_a_function_without_signature_is_rejected() -> None:
    with pytest.raises(ConfigTypeError, match="has no signature"):
        takes_config(WithoutSignature())


def test_the_name_of_a_partial_is_the_name_of_its_function() -> None:
    assert function_name(takes_two) == "takes_two"
    assert function_name(functools.partial(takes_two, 1)) == "takes_two"
    assert function_name(Callable0()) == "Callable0"


# ── round trip ──────────────────────────────────────────


def test_a_lambda_with_a_closure_is_loaded() -> None:
    base = 40
    assert output_of(pickle_function(lambda: print(base + 2))) == "42"


def test_a_function_of_a_project_module_is_pickled_by_value(project: Path) -> None:
    nets = importlib.import_module("project.nets")
    assert output_of(pickle_function(nets.train_loop)) == "42"


def test_a_referenced_project_module_is_pickled_by_value(project: Path) -> None:
    nets = importlib.import_module("project.nets")
    assert output_of(pickle_function(lambda: print(nets.Net().forward(2)))) == "6"


def test_the_sentinels_of_a_dataclass_keep_their_identity() -> None:
    @dataclasses.dataclass
    class Arguments:
        size: int = 1
        _: dataclasses.KW_ONLY
        names: list[str] = dataclasses.field(default_factory=list)

    def describe() -> None:
        size, names = dataclasses.fields(Arguments)
        kinds = size.default_factory, names.default, Arguments.__annotations__["_"]
        print([kind in (dataclasses.MISSING, dataclasses.KW_ONLY) for kind in kinds])
        print(Arguments(2).names)

    assert output_of(pickle_function(describe)) == "[True, True, True]\n[]"


def test_other_modules_are_pickled_by_name(project: Path) -> None:
    nets = importlib.import_module("project.nets")
    assert pickle_function(nets.train_loop, by_value_modules=()) == pickle.dumps(
        nets.train_loop, cloudpickle.DEFAULT_PROTOCOL
    )


def test_registrations_are_removed_after_an_error(project: Path) -> None:
    nets = importlib.import_module("project.nets")
    vars(nets)["lock"] = threading.Lock()
    before = cloudpickle.list_registry_pickle_by_value()
    with pytest.raises(ShippingError):
        pickle_function(lambda: nets.lock)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_registrations_of_the_user_are_kept(project: Path) -> None:
    package = importlib.import_module("project")
    cloudpickle.register_pickle_by_value(package)
    try:
        pickle_function(lambda: package.SCALE)
        assert "project" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(package)


# ── project modules ──────────────────────────────────────────


def test_modules_in_the_working_directory_belong_to_the_project(project: Path) -> None:
    nets = importlib.import_module("project.nets")
    assert nets in project_modules()
    assert nets not in project_modules(roots=["/nowhere"])


def test_installed_packages_do_not_belong_to_the_project() -> None:
    names = {module.__name__.partition(".")[0] for module in project_modules(roots=["/"])}
    assert not names & {"json", "msgspec", "pytest", "spotfit", "__main__"}


def test_a_sibling_directory_with_a_longer_name_does_not_belong_to_the_project(
    project: Path,
) -> None:
    nets = importlib.import_module("project.nets")
    assert nets not in project_modules(roots=[str(project)[:-1]])


def test_other_objects_in_sys_modules_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "other", object())
    monkeypatch.setitem(sys.modules, "none", None)
    assert all(isinstance(module, ModuleType) for module in project_modules(roots=["/"]))


def test_a_removed_working_directory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert isinstance(project_modules(), tuple)


def test_packages_required_by_a_pickle_are_recorded(project: Path) -> None:
    import msgspec

    nets = importlib.import_module("project.nets")

    def train_loop() -> Any:
        return msgspec.json.encode(threading.active_count()), nets.SCALE

    packages = pickle_object(
        train_loop, labeled_parts={}, by_value_modules=[nets, *project_modules()]
    ).packages
    assert packages == {"msgspec", "cloudpickle"}


# ── objects that cannot be pickled ──────────────────────────────────────────


def test_an_error_that_states_what_to_do_is_raised_unchanged() -> None:
    class Temporary:
        def __reduce__(self) -> Any:
            raise ConfigError("The rows are in temporary files.", do="Call materialize().")

    with pytest.raises(ConfigError, match="temporary files") as caught:
        pickle_object({"train": Temporary()}, labeled_parts={}, by_value_modules=())
    assert caught.value.do == "Call materialize()."


def test_an_unpicklable_part_is_named_by_its_path() -> None:
    cfg = {"lock": threading.Lock()}

    def train_loop() -> Any:
        return cfg

    with pytest.raises(TypeError) as caught:
        pickle_function(train_loop)
    assert "train_loop -> closure variable 'cfg' -> ['lock'] -> _thread.lock" in str(caught.value)
    assert "What to do: Create the object inside the training function" in str(caught.value)


def test_an_unpicklable_part_is_found_among_several() -> None:
    call = {"train_loop": print, "train_loop_config": {"rows": (n for n in [1])}}
    with pytest.raises(ShippingError, match=r"train_loop_config -> \['rows'\] -> generator"):
        pickle_object(tuple(call.values()), labeled_parts=call, by_value_modules=())


def test_a_shipping_error_can_be_pickled() -> None:
    with pytest.raises(ShippingError) as caught:
        pickle_function(threading.Lock().acquire)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_large_function_warns_with_its_largest_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_pickle, "WARN_PICKLE_BYTES", 1000)
    images = b"1" * 4096
    with pytest.warns(UserWarning, match=r"closure variable 'images' \(4.0 KiB\)"):
        pickle_function(lambda: images)


def test_a_function_above_the_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_pickle, "WARN_PICKLE_BYTES", 1000)
    monkeypatch.setattr(function_pickle, "MAX_PICKLE_BYTES", 2000)
    images = b"1" * 4096
    with pytest.raises(ShippingError, match=r"closure variable 'images'.* The limit is 2.0 KiB"):
        pickle_function(lambda: images)


# ── loading ──────────────────────────────────────────


def test_a_sealed_pickle_is_loaded() -> None:
    envelope = KEY.seal(cloudpickle.dumps({"loss": 0.5}), purpose="result")
    assert load_sealed_pickle(lambda: envelope, KEY, purpose="result") == {"loss": 0.5}


def test_a_damaged_read_of_a_sealed_pickle_is_repeated() -> None:
    envelope = KEY.seal(cloudpickle.dumps({"loss": 0.5}), purpose="result")
    reads = iter([envelope[:-5], b"", envelope])
    assert load_sealed_pickle(lambda: next(reads), KEY, purpose="result") == {"loss": 0.5}


def test_a_modified_pickle_is_not_loaded(tmp_path: Path) -> None:
    created_by_pickle = tmp_path / "sprung"
    envelope = KEY.seal(b"x", purpose="result")[:-1] + pickle.dumps(
        _TouchOnUnpickle(created_by_pickle)
    )
    with pytest.raises(IntegrityError):
        load_sealed_pickle(lambda: envelope, KEY, purpose="result")
    assert not created_by_pickle.exists()


class _TouchOnUnpickle:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_missing_module_is_named() -> None:
    body = pickle.dumps(Callable0()).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(ShippingError, match="the module 'xxx") as caught:
        unpickle(body, description="training function")
    assert all(term in caught.value.do for term in ("working_dir", "py_modules", "pip"))


def test_a_missing_class_points_to_versions() -> None:
    body = pickle.dumps(Callable0()).replace(b"Callable0", b"Callable9")
    with pytest.raises(ShippingError, match=r"AttributeError.*Callable9") as caught:
        unpickle(body, description="training function")
    assert "version" in caught.value.do


class FailsToLoad:
    """An object of which loading raises, such as a tensor for a device that is not there."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def load_error(fn: Callable[..., Any], config: dict[str, Any] | None = None) -> str:
    body = pickle_object((fn, config or {}), labeled_parts={}, by_value_modules=[THIS_MODULE]).body
    with pytest.raises(ShippingError, match="could not be loaded on the machine") as caught:
        unpickle(body, description="training function")
    return caught.value.message


a_global = [1, FailsToLoad()]


def helper_with_global() -> Any:
    return a_global


def test_a_captured_variable_that_cannot_be_loaded_is_named() -> None:
    complete, model, other, last = 1, FailsToLoad(), 3, 4

    def with_closure() -> Any:
        return complete, model, other, last

    def with_default(model: Any = model) -> Any:
        return model

    def with_helper() -> Any:
        return helper_with_global()

    assert load_error(with_closure).endswith("(in closure variable 'model' of with_closure())")
    assert load_error(with_default).endswith("(in a default argument of with_default())")
    assert load_error(helper_with_global).endswith("(in global 'a_global' of helper_with_global())")
    assert load_error(with_helper).endswith(
        "(in global 'helper_with_global' of with_helper() -> "
        "global 'a_global' of helper_with_global())"
    )


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model": FailsToLoad()}, "train_loop_config['model']"),
        ({"lr": 0.1, "model": FailsToLoad(), "steps": 3}, "train_loop_config['model']"),
        ({"model": {"weights": FailsToLoad()}}, "train_loop_config['model']"),
    ],
)
def test_an_entry_of_the_config_that_cannot_be_loaded_is_named(
    config: dict[str, Any], part: str
) -> None:
    assert load_error(print, config).endswith(f"(in {part})")


def test_a_variable_of_a_missing_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_here.py").write_text("class Model: pass")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("absent_here").Model()

    def train() -> Any:
        return model

    body = pickle_object((train, {}), labeled_parts={}, by_value_modules=[THIS_MODULE]).body
    monkeypatch.delitem(sys.modules, "absent_here")
    (tmp_path / "absent_here.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(
        ShippingError, match=r"'absent_here' is missing \(in closure variable 'model'"
    ):
        unpickle(body, description="training function")


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_a_tensor_on_an_accelerator_is_named_by_its_path() -> None:
    layer = torch.nn.Linear(1, 1)
    weights = {"layer": [torch.zeros(1).as_subclass(DeviceTensor)]}

    def train() -> Any:
        return layer, weights

    parts = {"train": train, "train_loop_config": {}}
    pickled = pickle_object((train, {}), labeled_parts=parts, by_value_modules=[THIS_MODULE])
    assert pickled.has_device_tensors
    error = device_tensor_error(parts)
    assert error is not None
    assert error.message == (
        "train -> closure variable 'weights' -> ['layer'] -> [0] is on the device cuda:0, and the "
        "workers have no accelerator."
    )


def test_tensors_on_the_cpu_are_no_device_tensors() -> None:
    layer, empty = torch.nn.Linear(1, 1), torch.zeros(1, device="meta")

    def train() -> Any:
        return layer, empty

    parts = {"train": train}
    pickled = pickle_object((train, {}), labeled_parts=parts, by_value_modules=[THIS_MODULE])
    assert not pickled.has_device_tensors
    assert device_tensor_error(parts) is None


def test_two_required_arguments_are_a_config_error() -> None:
    with pytest.raises(ConfigError):
        takes_config(takes_two)


def test_modules_of_a_project_on_windows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = SimpleNamespace(
        **{name: getattr(ntpath, name) for name in ("abspath", "dirname", "normcase")}
    )
    windows = SimpleNamespace(path=path, sep="\\", __file__="C:\\Python311\\Lib\\os.py")
    monkeypatch.setattr(function_pickle, "os", windows)
    files = {
        "nets": "c:\\Users\\Me\\project\\nets.py",
        "other": "C:\\Users\\me\\project2\\other.py",
        "library": "C:\\Users\\me\\project\\env\\Lib\\site-packages\\library.py",
    }
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    assert [m.__name__ for m in project_modules(roots=["C:\\Users\\me\\project"])] == ["nets"]


class LaptopPath(PureWindowsPath):
    """A path of Windows; `WindowsPath` cannot be instantiated here."""


def test_a_path_of_windows_becomes_a_path_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_pickle, "WindowsPath", LaptopPath)
    config = {"data": LaptopPath("data\\train.bin")}
    pickled = pickle_object(config, labeled_parts={}, by_value_modules=[])
    assert pickle.loads(pickled.body) == {"data": Path("data/train.bin")}
