"""What is packed at the door arrives on the machines, unchanged or not at all."""

import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    EnvironmentMismatchError,
    IntegrityError,
    ShippingError,
    TransientStoreError,
)
from spotfit.ship import pins
from spotfit.ship.environment import BundleId, RuntimeEnv, ShippedEnv
from spotfit.ship.luggage import (
    AROUND,
    Carried,
    Luggage,
    Payload,
    carried,
    check_environment,
    fetch,
    function_key,
    pack,
    unpack_function,
)
from spotfit.ship.sign import RunKey
from spotfit.ship.unpack import code_key
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN

KEY = RunKey(bytes(range(32)), RUN)


def packed(
    fn: Any,
    config: Any = None,
    *,
    store: MemoryStore,
    runtime_env: RuntimeEnv = RuntimeEnv(),  # noqa: B008 - frozen
    key: RunKey = KEY,
    objects: dict[str, Any] | None = None,
) -> Luggage:
    return pack(fn, config, runtime_env=runtime_env, key=key, store=store, objects=objects)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's that can be imported here, and only here."""
    (tmp_path / "steps.py").write_text(
        "import threading\n"
        "lock = threading.Lock()\n"
        "def train_loop():\n"
        "    with lock:\n"
        "        print('went')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    return importlib.import_module("steps")


def test_a_function_arrives_with_its_config(store: MemoryStore) -> None:
    base = 2
    luggage = packed(lambda config: base * config["lr"], {"lr": 21}, store=store)
    shipped = unpack_function(luggage, key=KEY, store=store)
    assert (shipped.takes_config, shipped.config) == (True, {"lr": 21})
    assert shipped.call() == 42


def test_a_function_that_wants_a_config_gets_an_empty_one(store: MemoryStore) -> None:
    luggage = packed(lambda config: config, store=store)
    assert unpack_function(luggage, key=KEY, store=store).call() == {}


def test_a_function_that_requires_nothing_is_called_with_nothing(store: MemoryStore) -> None:
    luggage = packed(lambda config=None: config, {"lr": 1}, store=store)
    assert unpack_function(luggage, key=KEY, store=store).call() is None


@contextmanager
def aloud(said: list[str]) -> Iterator[None]:
    said.append("in")
    yield
    said.append("out")


def test_a_context_that_is_packed_lies_around_the_call(store: MemoryStore) -> None:
    said: list[str] = []
    around = {AROUND: functools.partial(aloud, said)}
    luggage = packed(lambda: "called", store=store, objects=around)
    shipped = unpack_function(luggage, key=KEY, store=store)
    assert shipped.call() == "called"
    assert shipped.around.args == (["in", "out"],)  # type: ignore[attr-defined]


def test_function_and_config_share_what_they_share(store: MemoryStore) -> None:
    shared: list[int] = []
    luggage = packed(lambda config: config["them"] is shared, {"them": shared}, store=store)
    assert unpack_function(luggage, key=KEY, store=store).call() is True


def test_other_objects_travel_beside_and_are_loaded_alone(store: MemoryStore) -> None:
    luggage = packed(print, store=store, objects={"callbacks": [1, 2], "backend": "gloo"})
    payload = Payload.open(fetch(luggage, store=store), key=KEY)
    broken = msgspec.structs.replace(payload, function=b"not a pickle")
    assert (broken.load("callbacks"), broken.load("backend")) == ([1, 2], "gloo")


def test_the_spec_holds_luggage_as_plain_data(store: MemoryStore) -> None:
    luggage = packed(print, store=store)
    plain = msgspec.json.decode(msgspec.json.encode(luggage))
    assert msgspec.convert(plain, Luggage) == luggage
    assert luggage.function == "print"
    assert luggage.made_with == pins.here(["builtins"])


def test_packing_again_is_no_error(store: MemoryStore) -> None:
    def train_loop() -> None: ...

    assert packed(train_loop, store=store).sha256 == packed(train_loop, store=store).sha256


def test_the_key_is_not_in_the_luggage(store: MemoryStore) -> None:
    luggage = packed(lambda: 1, {"a": 1}, store=store)
    assert KEY.to_text().encode() not in fetch(luggage, store=store) + msgspec.json.encode(luggage)


def test_a_changed_payload_is_refused_before_it_is_opened(store: MemoryStore) -> None:
    luggage = packed(lambda: 1, store=store)
    changed = bytearray(fetch(luggage, store=store))
    changed[-1] ^= 1
    store.put(function_key(luggage.sha256), bytes(changed))
    with pytest.raises(IntegrityError, match="changed after it was packed"):
        unpack_function(luggage, key=KEY, store=store)
    with pytest.raises(IntegrityError):
        Payload.open(bytes(changed), key=KEY)


def test_a_payload_with_a_spec_to_match_is_refused_too(store: MemoryStore) -> None:
    forged = packed(lambda: 1, store=store, key=RunKey(bytes(32), RUN))
    with pytest.raises(IntegrityError, match="key of another run"):
        unpack_function(forged, key=KEY, store=store)


def test_a_payload_of_another_version_is_told(store: MemoryStore) -> None:
    foreign = KEY.seal(msgspec.msgpack.encode({"version": 9}), purpose="luggage")
    with pytest.raises(ShippingError, match="another version of spotfit"):
        Payload.open(foreign, key=KEY)


@pytest.mark.parametrize(
    ("fn", "config", "said"),
    [
        (lambda a, b: None, None, "0 or 1 required arguments"),
        ("train", None, "must be callable"),
        (print, {"lock": threading.Lock()}, r"train_loop_config -> \['lock'\] -> _thread.lock"),
    ],
)
def test_nothing_is_uploaded_when_something_is_wrong(
    store: MemoryStore, fn: Any, config: Any, said: str
) -> None:
    with pytest.raises((ConfigError, ShippingError), match=said):
        packed(fn, config, store=store)
    assert not list(store.list())


def test_an_object_that_cannot_travel_is_named(store: MemoryStore) -> None:
    with pytest.raises(ShippingError, match=r"callbacks -> \[0\] -> _thread.lock"):
        packed(print, store=store, objects={"callbacks": [threading.Lock()]})


def test_modules_in_the_working_directory_are_imported_from_there(
    store: MemoryStore, project: ModuleType, tmp_path: Path
) -> None:
    env = RuntimeEnv.parse({"working_dir": ".", "py_modules": ["steps.py"]})
    luggage = packed(project.train_loop, store=store, runtime_env=env)
    payload = Payload.open(fetch(luggage, store=store), key=KEY)
    assert set(luggage.bundles) == {payload.env.working_dir, *payload.env.py_modules}
    assert all(store.get(code_key(sha256)) for sha256 in luggage.bundles)
    call = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())[0]()"
    command = [sys.executable, "-c", call]
    done = subprocess.run(
        command, input=payload.function, capture_output=True, cwd=tmp_path, check=True
    )
    assert done.stdout == b"went\n"


def test_without_a_working_directory_a_module_that_cannot_travel_is_told(
    store: MemoryStore, project: ModuleType
) -> None:
    with pytest.raises(ShippingError, match="train_loop -> global 'lock'") as caught:
        packed(project.train_loop, store=store)
    assert "working_dir" in caught.value.do


def test_packages_of_the_users_own_are_not_wanted_installed(
    store: MemoryStore, project: ModuleType
) -> None:
    env = RuntimeEnv.parse({"py_modules": [project]})
    made_with = packed(project.train_loop, store=store, runtime_env=env).made_with
    assert made_with is not None
    assert "steps" not in made_with.needs


def test_what_was_uploaded_before_is_only_named(store: MemoryStore) -> None:
    earlier = BundleId("ab" * 32)
    env = RuntimeEnv({"A": "1"}, earlier, (earlier,), ("a==1",))
    luggage = packed(print, store=store, runtime_env=env)
    shipped = Payload.open(fetch(luggage, store=store), key=KEY).env
    assert (shipped.working_dir, shipped.py_modules) == (earlier, (earlier,))
    assert (shipped.env_vars, shipped.pip) == ({"A": "1"}, ("a==1",))
    assert luggage.bundles == ()


class Forgetful(MemoryStore):
    """Answers of `create` get lost, once before and once after the write."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def create(self, key: str, body: bytes) -> None:
        if self.writes:
            super().create(key, body)
        raise TransientStoreError("the answer was lost")


@pytest.mark.parametrize("writes", [True, False])
def test_a_lost_answer_is_no_lost_luggage(writes: bool) -> None:
    store = Forgetful(writes=writes)
    luggage = packed(lambda: 42, store=store)
    assert unpack_function(luggage, key=KEY, store=store).call() == 42


def test_luggage_that_is_there_is_left_alone(store: MemoryStore) -> None:
    luggage = packed(print, store=store)
    with pytest.raises(AlreadyExistsError):
        store.create(function_key(luggage.sha256), b"")
    assert packed(print, store=store) == luggage


# --- what would travel now -----------------------------------------------------------------------


def of_another_script() -> int:
    """Of this module, which is a project's own."""
    return 7


def test_the_same_code_would_travel_again(store: MemoryStore) -> None:
    luggage = packed(of_another_script, store=store)
    now = carried(of_another_script, None, runtime_env=RuntimeEnv())
    assert __name__ in luggage.code
    assert luggage.changed(now) == ()


def test_what_would_not_is_named(store: MemoryStore) -> None:
    luggage = packed(of_another_script, store=store)
    now = Carried({"__main__": "1", "more": "2"}, ("b",))
    files = "the files of working_dir or py_modules"
    assert luggage.changed(now) == ("the script itself", "more", __name__, files)


def test_of_luggage_that_tells_nothing_of_its_code_nothing_is_said() -> None:
    """As it was packed by versions before."""
    assert Luggage("0" * 64, 1, "train").changed(Carried({"more": "2"}, ())) == ()


# --- another world -------------------------------------------------------------------------------


def made_with(**changes: Any) -> Luggage:
    here = pins.here(["msgspec"])
    return Luggage("0" * 64, 1, "train", made_with=msgspec.structs.replace(here, **changes))


def test_the_machine_that_packed_may_be_the_one_that_unpacks() -> None:
    check_environment(made_with(), ShippedEnv())
    check_environment(Luggage("0" * 64, 1, "train"), ShippedEnv())  # nobody noted anything


def test_another_python_is_refused() -> None:
    with pytest.raises(EnvironmentMismatchError, match=r"Here runs cpython 2\.7\.18, the machines"):
        check_environment(made_with(python="2.7.18"), ShippedEnv())


def test_all_that_differs_is_told_at_once_but_not_what_will_be_installed() -> None:
    packages = {"msgspec": "99.0", "cloudpickle": "98.0"}
    with pytest.raises(EnvironmentMismatchError, match=r"cloudpickle is 98.*msgspec is 99"):
        check_environment(made_with(packages=packages), ShippedEnv())
    with pytest.raises(EnvironmentMismatchError, match="cloudpickle") as told:
        check_environment(made_with(packages=packages), ShippedEnv(pip=("msgspec==99.0",)))
    assert "msgspec" not in told.value.what
