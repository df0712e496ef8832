"""A code bundle is loaded on the machines unmodified, or rejected."""

import functools
import importlib
import logging
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

from spotfit.code import version_check
from spotfit.code.archive import archive_key
from spotfit.code.code_bundle import (
    TRAIN_FUNC_CONTEXT,
    CodeBundlePayload,
    CodeBundleRef,
    CodeFingerprint,
    LoadedFunction,
    check_environment,
    compute_code_fingerprint,
    fetch_code_bundle,
    payload_key,
    upload_code_bundle,
)
from spotfit.code.runtime_env import ArchiveId, PackagedRuntimeEnv, RuntimeEnv
from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    EnvironmentMismatchError,
    IntegrityError,
    ShippingError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID
from tests.unit.store.faulty_stores import DamagedResponses

KEY = RunKey(bytes(range(32)), RUN_ID)


def upload(
    fn: Any,
    config: Any = None,
    *,
    store: MemoryStore,
    runtime_env: RuntimeEnv = RuntimeEnv(),  # noqa: B008 - frozen
    key: RunKey = KEY,
    objects: dict[str, Any] | None = None,
) -> CodeBundleRef:
    return upload_code_bundle(
        fn, config, runtime_env=runtime_env, key=key, store=store, objects=objects
    )


def load(bundle: CodeBundleRef, store: MemoryStore) -> LoadedFunction:
    envelope = fetch_code_bundle(bundle, store=store)
    return CodeBundlePayload.open(envelope, key=KEY).load_function()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's project that only this process can import."""
    (tmp_path / "steps.py").write_text(
        "import threading\n"
        "lock = threading.Lock()\n"
        "def train_loop():\n"
        "    with lock:\n"
        "        print('called')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    return importlib.import_module("steps")


def test_a_loaded_function_has_its_config(store: MemoryStore) -> None:
    base = 2
    bundle = upload(lambda config: base * config["lr"], {"lr": 21}, store=store)
    loaded = load(bundle, store)
    assert (loaded.takes_config, loaded.config) == (True, {"lr": 21})
    assert loaded.call() == 42


def test_a_function_with_a_config_parameter_gets_an_empty_config_by_default(
    store: MemoryStore,
) -> None:
    bundle = upload(lambda config: config, store=store)
    assert load(bundle, store).call() == {}


def test_a_function_without_required_parameters_is_called_without_config(
    store: MemoryStore,
) -> None:
    bundle = upload(lambda config=None: config, {"lr": 1}, store=store)
    assert load(bundle, store).call() is None


@contextmanager
def recording(events: list[str]) -> Iterator[None]:
    events.append("enter")
    yield
    events.append("exit")


def test_a_packed_context_is_entered_around_the_call(store: MemoryStore) -> None:
    events: list[str] = []
    objects = {TRAIN_FUNC_CONTEXT: functools.partial(recording, events)}
    bundle = upload(lambda: "called", store=store, objects=objects)
    loaded = load(bundle, store)
    assert loaded.call() == "called"
    assert loaded.context.args == (["enter", "exit"],)  # type: ignore[attr-defined]


def test_objects_shared_by_function_and_config_stay_shared(store: MemoryStore) -> None:
    shared: list[int] = []
    bundle = upload(lambda config: config["shared"] is shared, {"shared": shared}, store=store)
    assert load(bundle, store).call() is True


def test_packed_objects_are_loaded_without_the_function(store: MemoryStore) -> None:
    bundle = upload(print, store=store, objects={"callbacks": [1, 2], "backend": "gloo"})
    payload = CodeBundlePayload.open(fetch_code_bundle(bundle, store=store), key=KEY)
    broken = msgspec.structs.replace(payload, function_pickle=b"not a pickle")
    assert (broken.load_object("callbacks"), broken.load_object("backend")) == ([1, 2], "gloo")


def test_a_reference_survives_json(store: MemoryStore) -> None:
    bundle = upload(print, store=store)
    plain = msgspec.json.decode(msgspec.json.encode(bundle))
    assert msgspec.convert(plain, CodeBundleRef) == bundle
    assert bundle.function_name == "print"
    assert bundle.environment == version_check.local_environment(["builtins"])


def test_uploading_again_is_idempotent(store: MemoryStore) -> None:
    def train_loop() -> None: ...

    assert upload(train_loop, store=store).sha256 == upload(train_loop, store=store).sha256


def test_the_run_key_is_not_in_the_bundle(store: MemoryStore) -> None:
    bundle = upload(lambda: 1, {"a": 1}, store=store)
    assert KEY.to_text().encode() not in fetch_code_bundle(
        bundle, store=store
    ) + msgspec.json.encode(bundle)


def test_a_modified_payload_is_rejected_before_unpickling(store: MemoryStore) -> None:
    bundle = upload(lambda: 1, store=store)
    changed = bytearray(fetch_code_bundle(bundle, store=store))
    changed[-1] ^= 1
    store.put(payload_key(bundle.sha256), bytes(changed))
    with pytest.raises(IntegrityError, match="modified after the upload"):
        load(bundle, store)
    with pytest.raises(IntegrityError):
        CodeBundlePayload.open(bytes(changed), key=KEY)


def test_a_payload_is_read_again_if_its_first_read_is_damaged() -> None:
    store = DamagedResponses()
    assert load(upload(lambda: "loaded", store=store), store).call() == "loaded"


def test_a_payload_of_another_key_is_rejected(store: MemoryStore) -> None:
    forged = upload(lambda: 1, store=store, key=RunKey(bytes(32), RUN_ID))
    with pytest.raises(IntegrityError, match="key of another run"):
        load(forged, store)


def test_a_payload_of_another_version_is_rejected(store: MemoryStore) -> None:
    other_version = KEY.seal(msgspec.msgpack.encode({"version": 9}), purpose="code bundle")
    with pytest.raises(ShippingError, match="another version of spotfit"):
        CodeBundlePayload.open(other_version, key=KEY)


@pytest.mark.parametrize(
    ("fn", "config", "message"),
    [
        (lambda a, b: None, None, "0 or 1 required arguments"),
        ("train", None, "must be callable"),
        (print, {"lock": threading.Lock()}, r"train_loop_config -> \['lock'\] -> _thread.lock"),
    ],
)
def test_nothing_is_uploaded_for_invalid_input(
    store: MemoryStore, fn: Any, config: Any, message: str
) -> None:
    with pytest.raises((ConfigError, ShippingError), match=message):
        upload(fn, config, store=store)
    assert not list(store.list())


def test_an_unpicklable_object_is_named(store: MemoryStore) -> None:
    with pytest.raises(ShippingError, match=r"callbacks -> \[0\] -> _thread.lock"):
        upload(print, store=store, objects={"callbacks": [threading.Lock()]})


def test_modules_in_the_working_directory_are_pickled_by_name(
    store: MemoryStore, project: ModuleType, tmp_path: Path
) -> None:
    env = RuntimeEnv.parse({"working_dir": ".", "py_modules": ["steps.py"]})
    bundle = upload(project.train_loop, store=store, runtime_env=env)
    payload = CodeBundlePayload.open(fetch_code_bundle(bundle, store=store), key=KEY)
    assert set(bundle.archive_ids) == {
        payload.runtime_env.working_dir,
        *payload.runtime_env.py_modules,
    }
    assert all(store.get(archive_key(sha256)) for sha256 in bundle.archive_ids)
    call = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())[0]()"
    command = [sys.executable, "-c", call]
    done = subprocess.run(
        command, input=payload.function_pickle, capture_output=True, cwd=tmp_path, check=True
    )
    assert done.stdout == b"called\n"


def test_without_a_working_directory_an_unpicklable_module_is_named(
    store: MemoryStore, project: ModuleType
) -> None:
    with pytest.raises(ShippingError, match="train_loop -> global 'lock'") as caught:
        upload(project.train_loop, store=store)
    assert "working_dir" in caught.value.do


def test_modules_of_the_project_are_not_required_packages(
    store: MemoryStore, project: ModuleType
) -> None:
    env = RuntimeEnv.parse({"py_modules": [project]})
    environment = upload(project.train_loop, store=store, runtime_env=env).environment
    assert environment is not None
    assert "steps" not in environment.required_packages


def test_archives_that_are_stored_already_are_referenced(store: MemoryStore) -> None:
    earlier = ArchiveId("ab" * 32)
    env = RuntimeEnv({"A": "1"}, earlier, (earlier,), ("a==1",))
    bundle = upload(print, store=store, runtime_env=env)
    loaded = CodeBundlePayload.open(fetch_code_bundle(bundle, store=store), key=KEY).runtime_env
    assert (loaded.working_dir, loaded.py_modules) == (earlier, (earlier,))
    assert (loaded.env_vars, loaded.pip) == ({"A": "1"}, ("a==1",))
    assert bundle.archive_ids == ()


class FailingCreateStore(MemoryStore):
    """`create` always fails, with or without writing."""

    def __init__(self, error: Exception, *, writes: bool) -> None:
        super().__init__()
        self.error = error
        self.writes = writes

    def create(self, key: str, body: bytes) -> None:
        if self.writes:
            super().create(key, body)
        raise self.error


@pytest.mark.parametrize(
    ("error", "writes"),
    [
        (TransientStoreError("the response was lost"), True),
        (TransientStoreError("409 ConditionalRequestConflict"), False),
        (StorePermissionError("403"), False),
    ],
)
def test_a_failed_create_is_repeated_as_a_write(error: Exception, *, writes: bool) -> None:
    store = FailingCreateStore(error, writes=writes)
    bundle = upload(lambda: 42, store=store)
    assert load(bundle, store).call() == 42


def test_an_existing_payload_is_not_overwritten(store: MemoryStore) -> None:
    bundle = upload(print, store=store)
    with pytest.raises(AlreadyExistsError):
        store.create(payload_key(bundle.sha256), b"")
    assert upload(print, store=store) == bundle


# --- fingerprints of the current code ------------------------------------------------------------


def function_of_this_module() -> int:
    """A function of a module that belongs to the project."""
    return 7


def test_unchanged_code_has_no_changes(store: MemoryStore) -> None:
    bundle = upload(function_of_this_module, store=store)
    current = compute_code_fingerprint(function_of_this_module, None, runtime_env=RuntimeEnv())
    assert __name__ in bundle.module_digests
    assert bundle.list_changes(current) == ()


def test_changed_modules_and_files_are_named(store: MemoryStore) -> None:
    bundle = upload(function_of_this_module, store=store)
    current = CodeFingerprint({"__main__": "1", "more": "2"}, ("b",))
    files = "the files of working_dir or py_modules"
    assert bundle.list_changes(current) == ("the script itself", "more", __name__, files)


def test_reference_without_a_code_fingerprint_has_no_changes() -> None:
    assert (
        CodeBundleRef("0" * 64, 1, "train").list_changes(CodeFingerprint({"more": "2"}, ())) == ()
    )


# --- environments --------------------------------------------------------------------------------


def reference(**changes: Any) -> CodeBundleRef:
    local = version_check.local_environment(["msgspec"])
    return CodeBundleRef(
        "0" * 64, 1, "train", environment=msgspec.structs.replace(local, **changes)
    )


def test_the_same_environment_is_accepted() -> None:
    check_environment(reference(), PackagedRuntimeEnv())
    # A reference without an environment is not compared.
    check_environment(CodeBundleRef("0" * 64, 1, "train"), PackagedRuntimeEnv())


def test_another_python_version_is_rejected() -> None:
    with pytest.raises(EnvironmentMismatchError, match=r"called from cpython 2\.7\.18"):
        check_environment(reference(python="2.7.18"), PackagedRuntimeEnv())


def test_all_differences_are_reported_except_packages_to_install() -> None:
    packages = {"msgspec": "99.0", "cloudpickle": "98.0"}
    with pytest.raises(EnvironmentMismatchError, match=r"cloudpickle is 98.*msgspec is 99"):
        check_environment(reference(packages=packages), PackagedRuntimeEnv())
    with pytest.raises(EnvironmentMismatchError, match="cloudpickle") as caught:
        check_environment(reference(packages=packages), PackagedRuntimeEnv(pip=("msgspec==99.0",)))
    assert "msgspec" not in caught.value.message


def test_uploaded_and_excluded_files_are_logged(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {".gitignore": "*.bin", "a.py": "", "train.bin": "12"}.items():
        (tmp_path / name).write_text(text)
    with caplog.at_level(logging.INFO, logger="spotfit"):
        upload(lambda: 1, runtime_env=RuntimeEnv(working_dir=tmp_path), store=store)
    [record] = [each for each in caplog.records if each.getMessage() == "code.uploaded"]
    expected = (
        f"{tmp_path}: 2 files (5 B) uploaded; excluded by .gitignore: 1 file (2 B): train.bin"
    )
    assert vars(record)["text"] == expected
