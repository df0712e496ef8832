"""A run's luggage: packed and sealed where `fit()` is called, opened on every machine.

One sealed payload holds the function with its config, the runtime environment, and other objects
by name. Whoever holds no key can read and change nothing in it: not the code, not the variables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from spotfit.core.errors import (
    AlreadyExistsError,
    EnvironmentMismatchError,
    IntegrityError,
    ShippingError,
    TransientStoreError,
)
from spotfit.ship import pins
from spotfit.ship.bundle import Bundle, bundle_directory, bundle_module
from spotfit.ship.environment import RuntimeEnv, ShippedEnv
from spotfit.ship.fingerprint import digest_of
from spotfit.ship.function import Pickled, name_of, own_modules, pickled, takes_config, unpickled
from spotfit.ship.sign import RunKey
from spotfit.ship.unpack import code_key
from spotfit.store.api import Store
from spotfit.store.transfer import fetched

AROUND = "train_func_context"
"""The name of the object that makes a context around the function, if one is packed."""
_PURPOSE = "luggage"


class Luggage(msgspec.Struct, frozen=True):
    """Where the luggage lies; goes into the run's spec. It orders nothing: the payload does."""

    sha256: str
    size_bytes: int
    function: str
    """The function's name, for people."""
    bundles: tuple[str, ...] = ()
    made_with: pins.Environment | None = None
    """What the machines' environment is compared with."""
    code: dict[str, str] = {}
    """The user's modules of which something travels inside, each with a digest of that."""

    def changed(self, now: Carried) -> tuple[str, ...]:
        """What would not travel as it did; nothing, where it is not known what did."""
        modules = {*self.code, *now.code} if self.code else set()
        changed = [name for name in modules if self.code.get(name) != now.code.get(name)]
        told = ["the script itself" if name == "__main__" else name for name in sorted(changed)]
        files = ["the files of working_dir or py_modules"] if self.bundles != now.bundles else []
        return (*told, *files)


class Carried(NamedTuple):
    """The user's own code as it would travel now."""

    code: dict[str, str]
    bundles: tuple[str, ...]


class Shipped(NamedTuple):
    """A function that has arrived."""

    fn: Callable[..., Any]
    takes_config: bool
    config: dict[str, Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes a context that is entered around the call."""

    def call(self) -> Any:
        """Run it the way it wants to be run."""
        with self.around():
            return self.fn(self.config) if self.takes_config else self.fn()


class Payload(msgspec.Struct, frozen=True):
    """Opened luggage. Its pickles were verified, and are loaded one by one on demand."""

    env: ShippedEnv
    takes_config: bool
    function: bytes
    objects: dict[str, bytes]

    @classmethod
    def open(cls, envelope: bytes, *, key: RunKey) -> Self:
        """Verify; nothing is unpickled yet. Raises `IntegrityError`, or `ShippingError`."""
        body = key.open(envelope, purpose=_PURPOSE)
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.DecodeError as foreign:
            raise ShippingError(
                f"The luggage was packed by another version of spotfit: {foreign}",
                do="Install the same version of spotfit here and where fit() is called.",
            ) from foreign

    def shipped(self) -> Shipped:
        """The function and its config. Raises `ShippingError` when it cannot be loaded here."""
        fn, config = unpickled(self.function, what="training function")
        around = self.load(AROUND) if AROUND in self.objects else nullcontext
        return Shipped(fn, self.takes_config, config, around)

    def load(self, name: str) -> Any:
        """One of the objects packed by name. Raises `KeyError`, `ShippingError`."""
        return unpickled(self.objects[name], what=name)


def pack(
    fn: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    runtime_env: RuntimeEnv,
    key: RunKey,
    store: Store,
    objects: Mapping[str, Any] | None = None,
) -> Luggage:
    """Leave everything the machines need in the run's store; may be called again.

    `objects` are pickled one by one beside the function, so that nobody loads what is not his.
    Raises `ConfigError` or `ShippingError` before anything is uploaded.
    """
    wants_config = takes_config(fn)
    code = _Code.of(runtime_env)
    pickles = _Pickles.of(fn, {} if config is None else config, objects or {}, code=code)
    payload = Payload(code.shipped(runtime_env), wants_config, pickles.function, pickles.objects)
    envelope = key.seal(msgspec.msgpack.encode(payload), purpose=_PURPOSE)
    for bundle in code.bundles():  # code first: luggage that is there can be unpacked
        _leave(store, code_key(bundle.sha256), bundle.body)
    sha256 = _sha256(envelope)
    _leave(store, function_key(sha256), envelope)
    return Luggage(
        sha256=sha256,
        size_bytes=len(envelope),
        function=name_of(fn),
        bundles=code.ids(),
        made_with=pins.here(pickles.packages),
        code=pickles.code,
    )


def carried(
    fn: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    runtime_env: RuntimeEnv,
    objects: Mapping[str, Any] | None = None,
) -> Carried:
    """What `pack` would take along of the user's code; nothing is uploaded. Raises as it does."""
    code = _Code.of(runtime_env)
    pickles = _Pickles.of(fn, {} if config is None else config, objects or {}, code=code)
    return Carried(pickles.code, code.ids())


def fetch(luggage: Luggage, *, store: Store) -> bytes:
    """The envelope, as it may be handed to every worker of a node. Raises `IntegrityError`."""
    envelope = fetched(store, function_key(luggage.sha256))
    if _sha256(envelope) != luggage.sha256:
        raise IntegrityError(
            f"The luggage of {luggage.function} was changed after it was packed.",
            do="See who else may write to the bucket, then start the run again.",
        )
    return envelope


def check_environment(luggage: Luggage, env: ShippedEnv) -> None:
    """Compare this machine with the one that packed.

    Raises the `EnvironmentMismatchError`, or one that tells of several.
    """
    made_with = luggage.made_with
    if made_with is None:
        return
    wrong = pins.compare(made_with, pins.here(made_with.needs), bringing=env.brings())
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise EnvironmentMismatchError(
            " ".join(one.what for one in wrong), do="\n".join(one.do for one in wrong)
        )


def unpack_function(luggage: Luggage, *, key: RunKey, store: Store) -> Shipped:
    """Fetch, verify, load. Raises `IntegrityError` or `ShippingError`."""
    return Payload.open(fetch(luggage, store=store), key=key).shipped()


def function_key(sha256: str) -> str:
    """Where the sealed payload lies below the run's root."""
    return f".spotfit/fn/{sha256}.pkl"


class _Code(NamedTuple):
    """What must be taken along from this machine."""

    working_dir: Bundle | None
    py_modules: dict[Path, Bundle]

    @classmethod
    def of(cls, env: RuntimeEnv) -> Self:
        folder = env.working_dir
        return cls(
            bundle_directory(folder) if isinstance(folder, Path) else None,
            {path: bundle_module(path) for path in env.py_modules if isinstance(path, Path)},
        )

    def bundles(self) -> list[Bundle]:
        return [*([self.working_dir] if self.working_dir else []), *self.py_modules.values()]

    def ids(self) -> tuple[str, ...]:
        return tuple(sorted(bundle.sha256 for bundle in self.bundles()))

    def shipped(self, env: RuntimeEnv) -> ShippedEnv:
        """The environment as the machines see it: bundles instead of paths."""
        modules = [self.py_modules[m].sha256 if isinstance(m, Path) else m for m in env.py_modules]
        there = env.working_dir if isinstance(env.working_dir, str) else None
        folder = self.working_dir.sha256 if self.working_dir else there
        return ShippedEnv(env.env_vars, folder, tuple(modules), env.pip)


class _Pickles(NamedTuple):
    function: bytes
    objects: dict[str, bytes]
    packages: frozenset[str]
    """What must be installed to load them."""
    code: dict[str, str]
    """The user's own code in them, by module."""

    @classmethod
    def of(
        cls, fn: Callable[..., Any], config: Any, objects: Mapping[str, Any], *, code: _Code
    ) -> Self:
        own = own_modules()
        by_value = [m for m in own if not any(bundle.holds(m) for bundle in code.bundles())]
        call = {name_of(fn): fn, "train_loop_config": config}
        function = pickled((fn, config), told_as=call, by_value_modules=by_value)
        others = {
            name: pickled(thing, told_as={name: thing}, by_value_modules=by_value)
            for name, thing in objects.items()
        }
        needed = function.packages.union(*(other.packages for other in others.values()))
        brought = {module.__name__.partition(".")[0] for module in own}
        bodies = {name: other.body for name, other in others.items()}
        digests = _digests([function, *others.values()])
        return cls(function.body, bodies, needed - brought, digests)


def _digests(several: Iterable[Pickled]) -> dict[str, str]:
    parts: dict[str, set[str]] = {}
    for one in several:
        for module, texts in one.code.items():
            parts.setdefault(module, set()).update(texts)
    return {module: digest_of(texts) for module, texts in sorted(parts.items())}


def _leave(store: Store, key: str, body: bytes) -> None:
    try:
        store.create(key, body)
    except AlreadyExistsError:
        return  # the key is the content's hash: it is there, by another name for "done"
    except TransientStoreError:
        store.put(key, body)  # for the same reason writing twice is writing once


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
