"""Functions and what belongs to them, to bytes and back.

By value goes what the machines cannot import: `__main__`, closures, lambdas and the user's own
modules. Everything else goes by name and must be installed there (`pins` compares).
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from spotfit.core.errors import ConfigError, ShippingError
from spotfit.core.units import told_bytes
from spotfit.ship.closure import Culprit, find_culprit, heaviest
from spotfit.ship.fingerprint import part_of
from spotfit.ship.sign import RunKey

WARN_BYTES = 16 * 2**20
LIMIT_BYTES = 512 * 2**20

_OURS = {"spotfit", "spotfit_provisioners", "spotfit_localsim"}
_INSTALLED = ("/site-packages/", "/dist-packages/")
_registry = threading.RLock()  # cloudpickle's list of by-value modules belongs to the whole process


class Pickled(NamedTuple):
    """A pickle, and the top-level packages that must be importable to load it."""

    body: bytes
    packages: frozenset[str]
    code: Mapping[str, frozenset[str]]
    """The user's code inside, by module: a text for each function and class."""


def takes_config(fn: Callable[..., Any]) -> bool:
    """Whether to call `fn(config)` rather than `fn()`.

    It takes the config if it has one required positional parameter, or `*args`. A parameter with
    a default is not asked for. Raises `ConfigError` for more, `ShippingError` for no function.
    """
    required = [p for p in _parameters(fn) if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    by_name_only = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) > 1 or by_name_only:
        raise ConfigError(
            f"{name_of(fn)} should take in 0 or 1 required arguments, by position, but it requires "
            f"{len(required)}: {', '.join(p.name for p in required)}.",
            do="Take one dictionary, and pass it as train_loop_config; bind the rest with "
            "functools.partial.",
        )
    return bool(required)


def name_of(fn: Any) -> str:
    """How people call this function."""
    fn = getattr(fn, "func", fn)  # a partial is known by what it calls
    return getattr(fn, "__name__", None) or type(fn).__name__


def pack_function(
    fn: Callable[..., Any], *, by_value_modules: Iterable[ModuleType] | None = None
) -> bytes:
    """The function as bytes that another process of the same Python can load.

    `by_value_modules` are taken along whole; `own_modules()` when None. Raises `ShippingError`
    naming the path to what cannot be pickled.
    """
    modules = own_modules() if by_value_modules is None else by_value_modules
    return pickled(fn, told_as={name_of(fn): fn}, by_value_modules=modules).body


def pickled(
    thing: Any, *, told_as: Mapping[str, Any], by_value_modules: Iterable[ModuleType]
) -> Pickled:
    """Any object as bytes; `told_as` names its parts, for messages.

    Raises `ShippingError` when a part cannot be pickled, or when the whole is too big.
    """
    with _by_value(by_value_modules) as own:
        body, noted = _dumped(thing, told_as)
        if len(body) > WARN_BYTES:
            _judge_weight(told_as, len(body))
    users = own | {"__main__"}
    named = {_top(name) for name in noted.named if name}
    packages = frozenset(named - users - _OURS) - sys.stdlib_module_names
    code = {name: frozenset(of) for name, of in noted.carried.items() if _top(name) in users}
    return Pickled(body, packages, code)


def own_modules(*, roots: Iterable[str] | None = None) -> tuple[ModuleType, ...]:
    """Loaded modules of the user's project.

    Their file lies below the script's or the working directory (or below `roots`), and is neither
    installed nor part of Python or of spotfit.
    """
    below = tuple(root.rstrip("/") + "/" for root in (roots or _project_roots()))
    python = os.path.dirname(os.__file__) + "/"  # noqa: PTH120 - for thousands of modules
    loaded: dict[str, Any] = dict(sys.modules)  # some put other things than modules there
    return tuple(
        module
        for name, module in loaded.items()
        if isinstance(module, ModuleType)
        and isinstance(file := module.__dict__.get("__file__"), str)
        and file.startswith(below)
        and not file.startswith(python)
        and not any(mark in file for mark in _INSTALLED)
        and _top(name) not in _OURS | {"__main__"}
    )


def load_pickle(envelope: bytes, key: RunKey, *, purpose: str) -> Any:
    """What was pickled and sealed for `purpose`.

    Raises `IntegrityError` before anything is unpickled, and `ShippingError` that guesses the
    cause when it cannot be loaded here.
    """
    return unpickled(key.open(envelope, purpose=purpose), what=purpose)


def unpickled(body: bytes, *, what: str) -> Any:
    """What verified bytes hold. Raises `ShippingError`; never call it with unverified bytes."""
    try:
        return pickle.loads(body)  # noqa: S301 - the caller has verified who wrote it
    except ModuleNotFoundError as missing:
        raise _missing_module(missing, what) from missing
    except Exception as error:
        raise ShippingError(
            f"The {what} could not be loaded here: {type(error).__name__}: {error}",
            do="Most often a package has another version here than where fit() was called, or an "
            "object needs a device that is not here (move tensors to the CPU first).",
            may_pass=not isinstance(error, _SAME_EVERYWHERE),
        ) from error


_SAME_EVERYWHERE = (ImportError, AttributeError, SyntaxError, pickle.UnpicklingError)
"""What a module that was carried there raises again on every machine; another of its errors may
come from what it asks of the world when it is imported."""


def _parameters(fn: Any) -> list[inspect.Parameter]:
    if not callable(fn):
        raise ShippingError(
            f"The training function must be callable; {fn!r} is a {type(fn).__name__}.",
            do="Pass the function itself: train_loop_per_worker=my_function.",
        )
    try:
        return list(inspect.signature(fn).parameters.values())
    except ValueError as unknown:
        raise ShippingError(
            f"{name_of(fn)} does not tell which arguments it takes.",
            do="Wrap it: def train_loop(config): ...",
        ) from unknown


class _Noted:
    """Whose classes and functions a pickle names, and whose it carries."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        self.carried: dict[str, set[str]] = {}

    def note(self, thing: Any, *, by_name: bool) -> None:
        module = thing.__name__ if isinstance(thing, ModuleType) else _module_of(thing)
        if by_name or isinstance(thing, ModuleType):
            self.named.add(module)
        if not by_name and isinstance(thing, (type, FunctionType, ModuleType)):
            self.carried.setdefault(module, set()).add(part_of(thing))


class _NotingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Notes what it names and what it carries."""

    def __init__(self, sink: Any) -> None:
        super().__init__(sink)
        self.noted = _Noted()

    def reducer_override(self, thing: Any) -> Any:
        reduced = super().reducer_override(thing)
        if isinstance(thing, _NAMED):
            self.noted.note(thing, by_name=reduced is NotImplemented)
        return reduced


_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)


def _module_of(thing: Any) -> str:
    return getattr(thing, "__module__", None) or ""


class _Scales:
    """A sink that keeps nothing but the weight."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def write(self, chunk: Any) -> int:
        size = memoryview(chunk).nbytes
        self.size_bytes += size
        return size


class _Sink(_Scales):
    """A sink that keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[bytes] = []

    def write(self, chunk: Any) -> int:
        self.chunks.append(bytes(chunk))
        return super().write(chunk)


def _dumped(thing: Any, told_as: Mapping[str, Any]) -> tuple[bytes, _Noted]:
    sink = _Sink()
    pickler = _NotingPickler(sink)
    try:
        pickler.dump(thing)
    except Exception as error:
        raise _unpicklable(told_as, error) from error
    return b"".join(sink.chunks), pickler.noted


def _unpicklable(things: Mapping[str, Any], error: Exception) -> ShippingError:
    suspects = (find_culprit(thing, name, _refusal) for name, thing in things.items())
    found = next(filter(None, suspects), None) or Culprit(tuple(things), things, error)
    return ShippingError(
        f"{found}\n  Why: {found.why}",
        do="Make it inside the training function, or pass what it is made from (a path, a name) "
        "in train_loop_config. If it belongs to a module of yours, pass that module's directory "
        "as worker_runtime_env={'working_dir': ...}, so that the machines import it themselves.",
        path=found.path,
    )


def _refusal(thing: Any) -> Exception | None:
    try:
        cloudpickle.Pickler(_Scales()).dump(thing)
    except Exception as error:  # noqa: BLE001 - the user's own __reduce__ may raise anything
        return error
    return None


def _judge_weight(things: Mapping[str, Any], size_bytes: int) -> None:
    heavy = [
        f"{name} -> {label} ({told_bytes(weight)})"
        for name, thing in things.items()
        for label, weight in heaviest(thing, _weight)
        if weight > WARN_BYTES / 16
    ]
    said = f"{', '.join(things)}: {told_bytes(size_bytes)} pickled; most of it: {', '.join(heavy)}."
    remedy = "Load big things inside the training function, from storage every machine can read."
    if size_bytes > LIMIT_BYTES:
        raise ShippingError(
            f"{said} The limit is {told_bytes(LIMIT_BYTES)}.", do=remedy, size_bytes=size_bytes
        )
    warnings.warn(f"{said} Every worker loads a copy. {remedy}", stacklevel=2)


def _weight(thing: Any) -> int:
    scales = _Scales()
    with suppress(Exception):  # a part that cannot stand alone has no weight of its own
        cloudpickle.Pickler(scales).dump(thing)
    return scales.size_bytes


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[set[str]]:
    """While it lasts, cloudpickle takes `modules` by value; gives their top-level names."""
    with _registry:
        known = cloudpickle.list_registry_pickle_by_value()
        names = {module.__name__ for module in modules} - known
        new = {name: sys.modules[name] for name in names if name in sys.modules}
        for module in new.values():
            cloudpickle.register_pickle_by_value(module)
        try:
            yield {_top(name) for name in known.union(new)}
        finally:
            for module in new.values():
                cloudpickle.unregister_pickle_by_value(module)


def _project_roots() -> set[str]:
    roots = set()
    with suppress(FileNotFoundError):  # the working directory may have been removed
        roots.add(os.getcwd())  # noqa: PTH109 - compared with strings
    if script := getattr(sys.modules.get("__main__"), "__file__", None):
        roots |= {os.path.dirname(os.path.abspath(script))}  # noqa: PTH100, PTH120 - likewise
    return roots


def _missing_module(missing: ModuleNotFoundError, what: str) -> ShippingError:
    top = _top(missing.name or "")
    return ShippingError(
        f"The {what} could not be loaded here: there is no module {missing.name!r}.",
        do=f"If {top!r} is a package, add it to worker_runtime_env={{'pip': [...]}} or to the "
        "machines' image; if it is yours, pass worker_runtime_env={'working_dir': ...} or "
        "{'py_modules': [...]}.",
        module=missing.name,
    )


def _top(module_name: str) -> str:
    return module_name.partition(".")[0]
