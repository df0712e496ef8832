"""The code bundle of a run: packed and encrypted by `fit()`, unpacked on every machine.

One encrypted payload (`CodeBundlePayload`) holds the pickled function with its config, the runtime
environment and further named objects. Without the run key it can be neither read nor modified.
`CodeBundleRef` in the run's spec identifies the payload by its SHA-256. Code archives of
`working_dir` and `py_modules` are stored beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from spotfit.code import version_check
from spotfit.code.archive import CodeArchive, archive_directory, archive_key, archive_module
from spotfit.code.fingerprint import combine_fingerprints
from spotfit.code.function_pickle import (
    device_tensor_error,
    function_name,
    pickle_object,
    project_modules,
    takes_config,
    unpickle,
)
from spotfit.code.runtime_env import PackagedRuntimeEnv, RuntimeEnv
from spotfit.core.errors import (
    AlreadyExistsError,
    EnvironmentMismatchError,
    IntegrityError,
    ShippingError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.host import log, machine
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read
from spotfit.store.transfer import download_bytes

DATASETS = "datasets"
"""Name of the packed object with the trainer's datasets, if it has any."""
TRAIN_FUNC_CONTEXT = "train_func_context"
"""Name of the packed object that creates a context manager around the function call, if any."""
# Authenticated with the payload, and part of integrity errors ("The sealed code bundle …").
_PURPOSE = "code bundle"


class CodeBundleRef(msgspec.Struct, frozen=True):
    """Reference to a stored code bundle, part of the run's spec.

    Unpacking depends only on the authenticated payload, not on the fields of this reference.
    """

    sha256: str
    size_bytes: int
    function_name: str
    """The function's name, for messages."""
    archive_ids: tuple[str, ...] = ()
    environment: version_check.SoftwareEnvironment | None = None
    """The caller's environment, which machines compare with their own."""
    module_digests: dict[str, str] = {}
    """A digest for each user module of which code is pickled by value."""

    def list_changes(self, current: CodeFingerprint) -> tuple[str, ...]:
        """Return which parts of the user's code differ between this bundle and `current`.

        `fit()` calls it before it follows an active run. The result has names for a message, such
        as `("the script itself", "mypkg.model", "the files of working_dir or py_modules")`, and is
        empty if the code is equal. Modules are not compared if the reference has no module digests.
        """
        # Of both: a module that was added or removed is a change as well.
        modules = {*self.module_digests, *current.module_digests} if self.module_digests else set()
        changed = [
            name
            for name in modules
            if self.module_digests.get(name) != current.module_digests.get(name)
        ]
        names = ["the script itself" if name == "__main__" else name for name in sorted(changed)]
        if self.archive_ids != current.archive_ids:
            names.append("the files of working_dir or py_modules")
        return tuple(names)


class CodeFingerprint(NamedTuple):
    """Digests of the user's code as it would be packed now."""

    module_digests: dict[str, str]
    archive_ids: tuple[str, ...]


class LoadedFunction(NamedTuple):
    """The training function and its config, loaded on a machine."""

    fn: Callable[..., Any]
    takes_config: bool
    config: dict[str, Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Creates the context manager in which the function is called."""

    def call(self) -> Any:
        """Call the training function, with the config if it takes one, and return its result.

        Runs within `context`. Exceptions of the function are passed on.
        """
        with self.context():
            return self.fn(self.config) if self.takes_config else self.fn()


class CodeBundlePayload(msgspec.Struct, frozen=True):
    """The decrypted content of a code bundle. Its authenticated pickles are loaded on demand."""

    runtime_env: PackagedRuntimeEnv
    takes_config: bool
    function_pickle: bytes
    object_pickles: dict[str, bytes]

    @classmethod
    def open(cls, envelope: bytes, *, key: RunKey) -> Self:
        """Decrypt and authenticate `envelope` with the run key, without unpickling anything.

        `envelope` is the result of `fetch_code_bundle`. Raises `IntegrityError` if it was modified
        or belongs to another run, `ShippingError` if another version of spotfit has packed it.
        """
        body = key.open(envelope, purpose=_PURPOSE)
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.DecodeError as error:
            raise ShippingError(
                "The code bundle was packed by another version of spotfit than the machine "
                f"{machine.hostname()} has: {error}",
                do="Install the same version of spotfit on the machines and where fit() is called.",
            ) from error

    def load_function(self) -> LoadedFunction:
        """Unpickle the training function, its config and its context, which runs code of the user.

        Each call loads new objects. Raises `ShippingError` if they cannot be loaded on this
        machine.
        """
        fn, config = unpickle(self.function_pickle, description="training function")
        context = (
            self.load_object(TRAIN_FUNC_CONTEXT)
            if TRAIN_FUNC_CONTEXT in self.object_pickles
            else nullcontext
        )
        return LoadedFunction(fn=fn, takes_config=self.takes_config, config=config, context=context)

    def load_object(self, name: str) -> Any:
        """Unpickle the object that `fit()` packed as `name`, for example `"callbacks"`.

        Each call loads a new object. Raises `KeyError` if the bundle has no object of that name,
        `ShippingError` if it cannot be loaded on this machine.
        """
        return unpickle(self.object_pickles[name], description=name)


def upload_code_bundle(
    fn: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    runtime_env: RuntimeEnv,
    key: RunKey,
    store: Store,
    objects: Mapping[str, Any] | None = None,
    has_accelerator: bool = True,
) -> CodeBundleRef:
    """Upload the function, its config, environment and code archives to the run's store.

    Called by `fit()` for each new run. `objects`, by name, are pickled separately, so that each
    process loads only those that it needs (`CodeBundlePayload.load_object`). Workers without an
    accelerator (`has_accelerator`) cannot load tensors in the memory of one. Idempotent: what is
    stored already is not replaced. Raises `ConfigError` or `ShippingError` before anything is
    uploaded, and the `StoreError` of a failed upload. The result becomes part of the run's spec.
    """
    # First, because it rejects an unsuitable function before the directories are read.
    needs_config = takes_config(fn)
    code = _CodeArchives.from_runtime_env(runtime_env)
    pickles = _CodeBundlePickles.create(fn, config, objects, code=code)
    if pickles.has_device_tensors and not has_accelerator:
        error = device_tensor_error(_labeled_parts(fn, config))
        if error is not None:
            raise error
    payload = CodeBundlePayload(
        runtime_env=code.package_env(runtime_env),
        takes_config=needs_config,
        function_pickle=pickles.function,
        object_pickles=pickles.objects,
    )
    envelope = key.seal(msgspec.msgpack.encode(payload), purpose=_PURPOSE)
    # Archives before the payload: a machine that finds the payload can also unpack its archives.
    for archive in code.archives():
        log.info("code.uploaded", text=archive.summary())
        _create_if_absent(store, archive_key(archive.sha256), archive.body)
    sha256 = _sha256(envelope)
    _create_if_absent(store, payload_key(sha256), envelope)
    return CodeBundleRef(
        sha256=sha256,
        size_bytes=len(envelope),
        function_name=function_name(fn),
        archive_ids=code.archive_ids(),
        environment=version_check.local_environment(pickles.packages),
        module_digests=pickles.module_digests,
    )


def compute_code_fingerprint(
    fn: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    runtime_env: RuntimeEnv,
    objects: Mapping[str, Any] | None = None,
) -> CodeFingerprint:
    """Return the digests of the code that `upload_code_bundle` would pack, without uploading.

    `fit()` compares it with the code of an active run of the same name. Reads the files of the
    runtime environment and pickles all objects. Raises `ShippingError` as `upload_code_bundle`
    does, but does not check the signature of `fn`.
    """
    code = _CodeArchives.from_runtime_env(runtime_env)
    pickles = _CodeBundlePickles.create(fn, config, objects, code=code)
    return CodeFingerprint(pickles.module_digests, code.archive_ids())


def fetch_code_bundle(code_bundle: CodeBundleRef, *, store: Store) -> bytes:
    """Download the encrypted payload, to be opened by `CodeBundlePayload.open`.

    Called on machines, with the run's store. Raises `IntegrityError` if its digest does not match,
    `NotFoundError` or another `StoreError` if it cannot be downloaded.
    """
    return repeat_read(partial(_fetch_once, code_bundle, store), errors=(IntegrityError,))


def _fetch_once(code_bundle: CodeBundleRef, store: Store) -> bytes:
    envelope = download_bytes(store, payload_key(code_bundle.sha256))
    if _sha256(envelope) != code_bundle.sha256:
        raise IntegrityError(
            f"The code bundle of {code_bundle.function_name} failed its integrity check: it was "
            "modified after the upload.",
            do="Check which accounts may write to the storage of the run, then start the run "
            "again.",
        )
    return envelope


def check_environment(code_bundle: CodeBundleRef, env: PackagedRuntimeEnv) -> None:
    """Compare the Python and package versions of this machine with those of the caller of `fit()`.

    Called by each agent before it installs `env`; packages in `env.pip` are not compared. Does
    nothing if the reference has no environment. Raises one `EnvironmentMismatchError` that names
    all differences that would prevent unpickling.
    """
    source = code_bundle.environment
    if source is None:  # the field is optional in the spec
        return
    mismatches = version_check.compare_environments(
        source,
        version_check.local_environment(source.required_packages),
        to_install=env.pip_distributions(),
    )
    if len(mismatches) == 1:
        raise mismatches[0]
    if mismatches:
        raise EnvironmentMismatchError(
            " ".join(mismatch.message for mismatch in mismatches),
            do="\n".join(mismatch.do for mismatch in mismatches),
        )


def payload_key(sha256: str) -> str:
    """Return the object key of the encrypted payload, relative to the root of the run's store.

    For example `".spotfit/fn/<sha256>.pkl"`. `sha256` is `CodeBundleRef.sha256`.
    """
    return f".spotfit/fn/{sha256}.pkl"


class _CodeArchives(NamedTuple):
    """Archives of the local directories and modules that the runtime environment names."""

    working_dir: CodeArchive | None
    py_modules: dict[Path, CodeArchive]

    @classmethod
    def from_runtime_env(cls, env: RuntimeEnv) -> Self:
        folder = env.working_dir
        return cls(
            archive_directory(folder) if isinstance(folder, Path) else None,
            {path: archive_module(path) for path in env.py_modules if isinstance(path, Path)},
        )

    def archives(self) -> list[CodeArchive]:
        return [*([self.working_dir] if self.working_dir else []), *self.py_modules.values()]

    def archive_ids(self) -> tuple[str, ...]:
        return tuple(sorted(archive.sha256 for archive in self.archives()))

    def package_env(self, env: RuntimeEnv) -> PackagedRuntimeEnv:
        """Return the environment with archive ids instead of local paths."""
        modules = [self.py_modules[m].sha256 if isinstance(m, Path) else m for m in env.py_modules]
        uploaded = env.working_dir if isinstance(env.working_dir, str) else None
        return PackagedRuntimeEnv(
            env_vars=env.env_vars,
            working_dir=self.working_dir.sha256 if self.working_dir else uploaded,
            py_modules=tuple(modules),
            pip=env.pip,
        )


class _CodeBundlePickles(NamedTuple):
    function: bytes
    objects: dict[str, bytes]
    packages: frozenset[str]
    """Packages that must be installed to load the pickles."""
    module_digests: dict[str, str]
    """Digests of the user's code in the pickles, by module."""
    has_device_tensors: bool
    """Whether the function or its config holds a tensor in the memory of an accelerator."""

    @classmethod
    def create(
        cls,
        fn: Callable[..., Any],
        config: Mapping[str, Any] | None,
        objects: Mapping[str, Any] | None,
        *,
        code: _CodeArchives,
    ) -> Self:
        config = {} if config is None else config
        own = project_modules()
        # Modules in an archive are importable on the machines; the others are pickled by value.
        by_value = [
            m for m in own if not any(archive.contains_module(m) for archive in code.archives())
        ]
        call = _labeled_parts(fn, config)
        # In one pickle: objects that the function and its config share stay shared.
        function = pickle_object((fn, config), labeled_parts=call, by_value_modules=by_value)
        others = {
            name: pickle_object(value, labeled_parts={name: value}, by_value_modules=by_value)
            for name, value in (objects or {}).items()
        }
        required = function.packages.union(*(other.packages for other in others.values()))
        fingerprints: dict[str, set[str]] = {}
        for pickled in (function, *others.values()):
            for module_name, definitions in pickled.user_code.items():
                fingerprints.setdefault(module_name, set()).update(definitions)
        # Modules of the project are not required packages: they are in the pickles or archives.
        uploaded = {module.__name__.partition(".")[0] for module in own}
        return cls(
            function=function.body,
            objects={name: other.body for name, other in others.items()},
            packages=required - uploaded,
            module_digests={
                name: combine_fingerprints(parts) for name, parts in sorted(fingerprints.items())
            },
            has_device_tensors=function.has_device_tensors,
        )


def _labeled_parts(fn: Callable[..., Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {function_name(fn): fn, "train_loop_config": {} if config is None else config}


def _create_if_absent(store: Store, key: str, body: bytes) -> None:
    try:
        store.create(key, body)
    except AlreadyExistsError:
        return  # the key is the content's hash, hence the same content is stored already
    except (TransientStoreError, StorePermissionError):
        # The create was not repeated, and its outcome may be unknown. This write stores the same
        # content.
        store.put(key, body)


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
