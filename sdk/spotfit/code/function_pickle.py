"""Pickling of functions and the objects that they reference, and loading of the pickles.

Code that the machines cannot import is pickled by value: `__main__`, closures, lambdas and modules
of the user's project. Everything else is pickled by name and must be installed on the machines;
`version_check` compares the versions.

Search for the part of an object that cannot be pickled, or that makes a pickle large.

This module does not pickle: the caller passes a `PickleCheck`. The search descends into the first
part that fails the check, until no part of the current object fails.

Conversion of exceptions raised by user code to messages: traceback text and a pickle.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import inspect
import io
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, WindowsPath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple

import cloudpickle

from spotfit.code.fingerprint import fingerprint_definition
from spotfit.core.errors import (
    ConfigError,
    ConfigTypeError,
    IntegrityError,
    ShippingError,
    SpotfitError,
)
from spotfit.core.units import format_bytes
from spotfit.host import machine
from spotfit.policy.retry_budget import diagnose_setup_failure, is_permanent_error
from spotfit.protocol.worker_agent import WorkerRaised
from spotfit.security.run_key import RunKey
from spotfit.store.retry import repeat_read

# --- Search for the part of an object -------------------------------------------------------------


LabeledPart = tuple[str, Any]
"""A label such as "closure variable 'model'", and the part itself."""

PickleCheck = Callable[[Any], Exception | None]
"""Returns the error of pickling an object, or None."""

# Each level pickles its object once, so the search is quadratic in the depth.
_MAX_DEPTH = 40
_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_SKIPPED_ATTRIBUTES = {"__dict__", "__weakref__", "_abc_impl", "__builtins__"}


class UnpicklablePart(NamedTuple):
    """The innermost part that cannot be pickled."""

    path: tuple[str, ...]
    value: Any
    error: Exception

    def __str__(self) -> str:
        return " -> ".join((*self.path, f"{_describe_type(self.value)} cannot be pickled"))


def find_unpicklable_part(
    value: Any, name: str, check_pickle: PickleCheck
) -> UnpicklablePart | None:
    """Return the innermost part of `value` that cannot be pickled; None if `value` can be.

    `name` labels `value` in the path of the result, for example `("train_loop_config",
    "['lock']")`. `check_pickle` is called for `value` and many of its parts.
    """
    if error := check_pickle(value):
        suspect = UnpicklablePart((name,), value, error)
        return _UnpicklableSearch(check_pickle).find_innermost(suspect)
    return None


def largest_parts(
    value: Any, size: Callable[[Any], int], *, count: int = 3
) -> list[tuple[str, int]]:
    """Return label and size of the `count` largest direct parts of `value`, largest first.

    `size` returns the size of a part in bytes; it is called for every direct part.
    """
    sizes = [(label, size(part)) for label, part in iterate_parts(value)]
    return sorted(sizes, key=lambda item: -item[1])[:count]


def iterate_parts(value: Any) -> Iterator[LabeledPart]:
    """Yield label and value of each object that a by-value pickle of `value` references directly.

    Labels are for messages, such as `"closure variable 'model'"`, `"[3]"` or `".optimizer"`. Yields
    nothing for objects without parts or that cannot be reduced.
    """
    match value:
        case FunctionType():
            yield from _function_parts(value)
        case MethodType():
            yield "its object", value.__self__
            yield "its function", value.__func__
        case partial():
            yield "its function", value.func
            for n, argument in enumerate(value.args):
                yield f"bound argument {n}", argument
            for name, argument in value.keywords.items():
                yield f"bound argument {name!r}", argument
        case dict() | MappingProxyType():
            yield from _mapping_parts(value)
        case list() | tuple() | set() | frozenset():
            yield from _item_parts(value)
        case ModuleType() | type():
            yield from _attribute_parts(vars(value))
        case staticmethod() | classmethod():
            yield "its function", value.__func__
        case property():
            accessors = {"fget": value.fget, "fset": value.fset, "fdel": value.fdel}
            yield from _attribute_parts(accessors)
        case _:
            yield from _instance_parts(value)


class _UnpicklableSearch:
    """Depth-first search. A visited object is not entered again, so cycles terminate."""

    def __init__(self, check_pickle: PickleCheck) -> None:
        self._check_pickle = check_pickle
        # Holds references to the objects: the id of a deleted object could be reused.
        self._visited: dict[int, Any] = {}

    def find_innermost(self, suspect: UnpicklablePart) -> UnpicklablePart | None:
        """Return the innermost part of `suspect` that cannot be pickled, or `suspect` itself.

        None in a cycle of references, where an outer call finds or has found the part.
        """
        self._visited[id(suspect.value)] = suspect.value
        in_a_cycle = False
        parts = iterate_parts(suspect.value) if len(suspect.path) < _MAX_DEPTH else ()
        for label, part in parts:
            error = None if isinstance(part, _ATOMS) else self._check_pickle(part)
            if error is None:
                continue
            if id(part) in self._visited:
                in_a_cycle = True
            elif found := self.find_innermost(UnpicklablePart((*suspect.path, label), part, error)):
                return found
        # In a cycle the failing part is another one, which an outer call finds or has found.
        return None if in_a_cycle else suspect


def _function_parts(function: FunctionType) -> Iterator[LabeledPart]:
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable is not bound yet
            yield f"closure variable {name!r}", cell.cell_contents
    for name in _global_names(code):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]
    # Defaults belong to the last positional parameters.
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    by_name = dict(zip(positional, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, default in by_name.items():
        yield f"default of {name!r}", default
    yield from _attribute_parts(vars(function))


def _global_names(code: CodeType) -> Iterable[str]:
    # From the instructions: co_names also has the names of attributes. A dict keeps the order.
    names = {
        step.argval: None
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_global_names(constant))
    return names


def _mapping_parts(mapping: dict[Any, Any] | MappingProxyType[Any, Any]) -> Iterator[LabeledPart]:
    for key, value in mapping.items():
        yield f"key {_shorten(key)}", key
        yield f"[{_shorten(key)}]", value


def _item_parts(items: Iterable[Any]) -> Iterator[LabeledPart]:
    for n, item in enumerate(items):
        yield f"[{n}]", item


def _attribute_parts(
    attributes: dict[str, Any] | MappingProxyType[str, Any],
) -> Iterator[LabeledPart]:
    for name, value in attributes.items():
        if name not in _SKIPPED_ATTRIBUTES:
            yield f".{name}", value


def _instance_parts(value: Any) -> Iterator[LabeledPart]:
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - a user's __reduce__; its error was recorded by the check
        return
    if not isinstance(reduced, tuple):  # a name: the object is pickled by reference
        return
    # A function, its arguments, and optionally state, list items, dict items and a state setter.
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for argument in arguments:
        label = f"its class {argument.__qualname__}" if isinstance(argument, type) else "its value"
        yield label, argument
    # A tuple is the state of an object with slots: its dict, and the values of the slots.
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None:
            yield from _attribute_parts(part) if isinstance(part, dict) else [("its state", part)]
    yield from _item_parts(items or ())
    yield from _mapping_parts(dict(pairs or ()))


def _shorten(key: Any) -> str:
    text = repr(key) if isinstance(key, _ATOMS) else f"<{_describe_type(key)}>"
    return text if len(text) <= 40 else f"{text[:37]}…"


def _describe_type(value: Any) -> str:
    if isinstance(value, (FunctionType, type, ModuleType)):
        return f"{type(value).__name__} {value.__name__!r}"
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


# Every worker loads a copy of the pickle. Larger ones usually contain data by accident.
WARN_PICKLE_BYTES = 16 * 2**20
MAX_PICKLE_BYTES = 512 * 2**20

_OWN_PACKAGES = {"spotfit", "spotfit_provisioners", "spotfit_localsim"}
_SITE_PACKAGES = ("/site-packages/", "/dist-packages/")
# cloudpickle's registry of by-value modules is global to the process.
_registry_lock = threading.RLock()


class PickledObject(NamedTuple):
    """A pickle and its dependencies."""

    body: bytes
    packages: frozenset[str]
    """Top-level packages that must be importable to load the pickle."""
    user_code: Mapping[str, frozenset[str]]
    """Fingerprints of the functions and classes that are pickled by value, by module."""
    has_device_tensors: bool = False
    """Whether it contains a torch tensor in the memory of an accelerator."""


def takes_config(fn: Callable[..., Any]) -> bool:
    """Whether the training function is called as `fn(config)` rather than `fn()`.

    True if it has one required positional parameter, or `*args`. Parameters with a default are
    ignored. Called by `fit()` before it starts a run. Raises `ConfigError` for more required
    parameters or a required keyword, `ConfigTypeError` for an object that is not callable or has no
    signature.
    """
    if not callable(fn):
        raise ConfigTypeError(
            f"The training function must be callable, but {fn!r} is a {type(fn).__name__}.",
            do="Pass the function itself: train_loop_per_worker=my_function.",
        )
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError as error:  # some functions of extension modules
        raise ConfigTypeError(
            f"The training function {function_name(fn)} has no signature, so its arguments are "
            "unknown.",
            do="Wrap it in a Python function: def train_loop(config): ...",
        ) from error
    # *args counts as a required parameter, **kwargs does not: the config is passed by position.
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    by_name_only = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) > 1 or by_name_only:
        raise ConfigError(
            f"{function_name(fn)} should take in 0 or 1 required arguments, by position, but it "
            f"requires {len(required)}: {', '.join(p.name for p in required)}.",
            do="Accept one dictionary and pass it as train_loop_config; bind other arguments with "
            "functools.partial.",
        )
    return bool(required)


def function_name(fn: Any) -> str:
    """Return the name of the function for messages; for a partial, that of the function it wraps.

    Objects without `__name__` give the name of their class.
    """
    fn = getattr(fn, "func", fn)  # a partial has the name of the function that it wraps
    return getattr(fn, "__name__", None) or type(fn).__name__


def pickle_object(
    value: Any, *, labeled_parts: Mapping[str, Any], by_value_modules: Iterable[ModuleType]
) -> PickledObject:
    """Pickle `value` with cloudpickle, code of `__main__` and of `by_value_modules` by value.

    `labeled_parts` maps names such as `"train_loop_config"` to parts of `value`, for messages.
    Warns (`UserWarning`) with the largest parts if the pickle exceeds 16 MiB. Raises
    `ShippingError` naming the path to a part that cannot be pickled, or the largest parts if the
    pickle exceeds 512 MiB (`MAX_PICKLE_BYTES`), and a `ConfigError` of a part unchanged.
    """
    sink = io.BytesIO()
    pickler = _RecordingPickler(sink)
    with _register_by_value(by_value_modules) as own:
        try:
            pickler.dump(value)
        except ConfigError:
            raise  # of a part that states itself what to do, such as a dataset in temporary files
        except Exception as error:
            raise _unpicklable_error(labeled_parts, error) from error
        body = sink.getvalue()
        if len(body) > WARN_PICKLE_BYTES:
            _check_size(labeled_parts, len(body))
    user_modules = own | {"__main__"}
    imported = {_top_level_name(name) for name in pickler.modules_by_name if name}
    packages = frozenset(imported - user_modules - _OWN_PACKAGES) - sys.stdlib_module_names
    code = {
        name: frozenset(definitions)
        for name, definitions in pickler.definitions_by_module.items()
        if _top_level_name(name) in user_modules
    }
    return PickledObject(body, packages, code, pickler.device is not None)


def device_tensor_error(labeled_parts: Mapping[str, Any]) -> ShippingError | None:
    """Return the error that names the first part with a tensor on an accelerator; None without one.

    `labeled_parts` are those of `pickle_object`, of which the result `has_device_tensors`. For
    workers without an accelerator, which could not load it.
    """
    for name, part in labeled_parts.items():
        found = find_unpicklable_part(part, name, _check_devices)
        if found is not None:
            return ShippingError(
                f"{' -> '.join(found.path)} is {found.error}, and the workers have no accelerator.",
                do="Move it to the CPU before fit(), with tensor.cpu() or model.to('cpu'); or "
                "create it inside the training function. For workers with GPUs set "
                "ScalingConfig(use_gpu=True).",
                path=found.path,
            )
    return None


def _check_devices(value: Any) -> Exception | None:
    pickler = _RecordingPickler(_SizeCounter())
    with suppress(Exception):  # a part that can only be pickled within the whole
        pickler.dump(value)
    return ValueError(f"on the device {pickler.device}") if pickler.device is not None else None


def project_modules(*, roots: Iterable[str] | None = None) -> tuple[ModuleType, ...]:
    """Return the loaded modules of the user's project, without `__main__`. Imports nothing.

    Their files are below the script's directory or the working directory (or below `roots`,
    absolute paths), and are neither installed packages nor part of Python or of spotfit.
    """
    if not roots:
        roots = set()
        with suppress(FileNotFoundError):  # the working directory may have been removed
            roots.add(os.getcwd())  # noqa: PTH109 - compared with strings
        if script := getattr(sys.modules.get("__main__"), "__file__", None):
            roots.add(os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH120 - as above
    prefixes = tuple(_comparable_path(root).rstrip("/") + "/" for root in roots)
    # Plain strings instead of Path: thousands of modules are compared.
    python = _comparable_path(os.path.dirname(os.__file__)) + "/"  # noqa: PTH120
    loaded: dict[str, Any] = dict(sys.modules)  # libraries may insert objects that are no modules
    return tuple(
        module
        for name, module in loaded.items()
        if isinstance(module, ModuleType)
        and isinstance(path := module.__dict__.get("__file__"), str)
        and (file := _comparable_path(path)).startswith(prefixes)
        and not file.startswith(python)
        and not any(mark in file for mark in _SITE_PACKAGES)
        and _top_level_name(name) not in _OWN_PACKAGES | {"__main__"}
    )


def _comparable_path(path: str) -> str:
    """Return the path with '/', and in lower case where case is not significant (Windows)."""
    return os.path.normcase(path).replace(os.sep, "/")


def load_sealed_pickle(read: Callable[[], bytes], key: RunKey, *, purpose: str) -> Any:
    """Decrypt, authenticate and unpickle an object that `RunKey.seal` has sealed for `purpose`.

    For the results and exceptions that a run has stored; `purpose` is their object key. `read`
    returns the envelope, and is called again if that is damaged. Raises `IntegrityError` before
    anything is unpickled if the envelope was modified or has another purpose, `ShippingError` if
    loading fails, and the errors of `read`.
    """
    body = repeat_read(lambda: key.open(read(), purpose=purpose), errors=(IntegrityError,))
    return unpickle(body, description=purpose)


def unpickle(body: bytes, *, description: str) -> Any:
    """Load a pickle of authenticated bytes, which runs code of the user.

    `description` names it in messages, for example `"training function"`. Raises `ShippingError` if
    it cannot be loaded, with `details["module"]` if a module is missing, else with
    `details["retryable"]`: whether another machine may be able to load it.
    """
    try:
        return pickle.loads(body)  # noqa: S301 - authenticated by the caller
    except ModuleNotFoundError as missing:
        top = _top_level_name(missing.name or "")
        raise ShippingError(
            f"The {description} could not be loaded on the machine {machine.hostname()}: the "
            f"module {missing.name!r} is missing{_format_failed_part(body)}.",
            do=f"If {top!r} is a package, add it to worker_runtime_env={{'pip': [...]}} or to the "
            "machines' image; if it is part of your project, pass worker_runtime_env="
            "{'working_dir': ...} or {'py_modules': [...]}.",
            module=missing.name,
        ) from missing
    except Exception as error:
        raise ShippingError(
            f"The {description} could not be loaded on the machine {machine.hostname()}: "
            f"{type(error).__name__}: {error}{_format_failed_part(body)}",
            do="Compare the package versions on that machine and where the object was pickled. If "
            "an object needs a device that the machine lacks, move its tensors to the CPU first.",
            retryable=not isinstance(error, _DETERMINISTIC_ERRORS),
        ) from error


def _format_failed_part(body: bytes) -> str:
    """Return " (in closure variable 'model')" for a pickle that does not load; '' if unknown."""
    # Only Python's own implementation shows what it has built before the error.
    unpickler: Any = pickle._Unpickler(io.BytesIO(body))  # noqa: SLF001
    try:
        unpickler.load()
    except BaseException:  # noqa: BLE001 - the error that `unpickle` reports, from the user's code
        frames = [*unpickler.metastack, unpickler.stack]
        path = [*_unfinished_variables([part for frame in frames for part in frame])]
        path = path or [*_unfinished_config_key(frames)]
        return f" (in {' -> '.join(path)})" if path else ""
    return ""  # it has loaded this time


_FUNCTION_STATE = ("__name__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__")


def _unfinished_variables(built: list[Any]) -> Iterator[str]:
    """Yield the variables that an interrupted unpickler was building, outermost first.

    `built` holds, for each function that cloudpickle has pickled by value, the function and then
    the keys and values of its state, up to the one that is not complete.
    """
    function: FunctionType | None = None
    states: dict[int, tuple[FunctionType, int]] = {}  # the last key of each function's state
    for n, part in enumerate(built):
        if isinstance(part, FunctionType) and part.__module__ != "cloudpickle.cloudpickle":
            function = part
        if isinstance(part, str) and part in _FUNCTION_STATE and function is not None:
            states[id(function)] = function, n
    ends = [*(n for _, n in states.values()), len(built)][1:]
    for (function, n), end in zip(states.values(), ends, strict=True):
        rest, code = built[n + 1 : end], function.__code__
        cells = sum(isinstance(part, CellType) for part in rest)
        names = [part for part in rest if isinstance(part, str) and part in _global_names(code)]
        if built[n] == "__globals__" and names:
            yield f"global {names[-1]!r} of {function.__name__}()"
        elif built[n] == "__closure__" and cells < len(code.co_freevars):
            yield f"closure variable {code.co_freevars[cells]!r} of {function.__name__}()"
        elif built[n] in ("__defaults__", "__kwdefaults__"):
            yield f"a default argument of {function.__name__}()"


def _unfinished_config_key(frames: list[list[Any]]) -> Iterator[str]:
    """Yield the entry of train_loop_config that an interrupted unpickler was building."""
    # The function and its config are one tuple.
    if len(frames[0]) < 2 or not isinstance(frames[0][1], dict):
        return
    # A config with one entry is built in the frame of the tuple.
    pairs = frames[0][2:3] or (frames[1] if len(frames) > 1 else [])
    # A container or a function may be the value of a complete entry, or a part of the last one.
    is_certain = not any(isinstance(part, dict | list) or callable(part) for part in pairs[1:-2])
    key = pairs[(len(pairs) - 1) // 2 * 2] if pairs else None
    is_key = is_certain and isinstance(key, str)
    yield f"train_loop_config[{key!r}]" if is_key else "train_loop_config"


_DETERMINISTIC_ERRORS = (ImportError, AttributeError, SyntaxError, pickle.UnpicklingError)
"""Errors that a pickle raises on every machine. Others may depend on the machine, for example an
OSError of a module that opens a file when it is imported."""


class _RecordingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Records modules that the pickle references by name, and definitions contained by value."""

    def __init__(self, sink: Any) -> None:
        super().__init__(sink)
        self.modules_by_name: set[str] = set()
        self.definitions_by_module: dict[str, set[str]] = {}
        self.device: str | None = None
        """The device of the first tensor that is neither on the CPU nor without data."""
        # Not imported: without torch in this process there are no tensors.
        self._tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)

    def reducer_override(self, obj: Any) -> Any:
        is_tensor = self._tensor_type is not None and isinstance(obj, self._tensor_type)
        if is_tensor and self.device is None and obj.device.type not in ("cpu", "meta"):
            self.device = str(obj.device)
        if isinstance(obj, WindowsPath):  # Linux cannot load one; relative paths are valid there
            return Path, obj.parts
        if (name := dataclass_sentinel_name(obj)) is not None:
            return name
        reduced = super().reducer_override(obj)
        if not isinstance(obj, _RECORDED_TYPES):
            return reduced
        # cloudpickle returns NotImplemented for objects that it leaves to pickle by name.
        by_name = reduced is NotImplemented
        module = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__ or ""
        # A module that is pickled by value is a reference as well: its imports are not pickled.
        if by_name or isinstance(obj, ModuleType):
            self.modules_by_name.add(module)
        if not by_name and not isinstance(obj, BuiltinFunctionType):
            self.definitions_by_module.setdefault(module, set()).add(fingerprint_definition(obj))
        return reduced


_RECORDED_TYPES = (type, FunctionType, BuiltinFunctionType, ModuleType)


def dataclass_sentinel_name(obj: Any) -> str | None:
    """Return the name in `dataclasses` of MISSING or KW_ONLY, for `reducer_override`; else None.

    cloudpickle copies these, but `dataclasses` and its users compare by identity: a copied field
    without `default_factory` seems to have one.
    """
    if obj is dataclasses.MISSING:
        return "MISSING"
    return "KW_ONLY" if obj is dataclasses.KW_ONLY else None


class _SizeCounter:
    """A write target that only counts bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def write(self, chunk: Any) -> int:
        size = memoryview(chunk).nbytes
        self.size_bytes += size
        return size


def _unpicklable_error(labeled_parts: Mapping[str, Any], error: Exception) -> ShippingError:
    suspects = (
        find_unpicklable_part(part, name, lambda value: _try_pickle(value)[1])
        for name, part in labeled_parts.items()
    )
    # No suspect if every part alone can be pickled, for example if pickling fails by chance.
    found = next(filter(None, suspects), None) or UnpicklablePart(
        tuple(labeled_parts), labeled_parts, error
    )
    return ShippingError(
        f"{found}\n  Reason: {found.error}",
        do="Create the object inside the training function, or pass the values that it is created "
        "from (a path, a name) in train_loop_config. If it belongs to a module of your project, "
        "pass that module's directory as worker_runtime_env={'working_dir': ...}, so that the "
        "machines import it.",
        path=found.path,
    )


def _try_pickle(value: Any) -> tuple[int, Exception | None]:
    """Return the size of the pickle, or its size up to the error, and the error."""
    counter = _SizeCounter()
    try:
        cloudpickle.Pickler(counter).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's own __reduce__ may raise anything
        return counter.size_bytes, error
    return counter.size_bytes, None


def _check_size(labeled_parts: Mapping[str, Any], size_bytes: int) -> None:
    large = [
        f"{name} -> {label} ({format_bytes(part_bytes)})"
        for name, part in labeled_parts.items()
        for label, part_bytes in largest_parts(part, lambda value: _try_pickle(value)[0])
        if part_bytes > WARN_PICKLE_BYTES / 16
    ]
    names = ", ".join(labeled_parts)
    summary = f"{names}: {format_bytes(size_bytes)} pickled; largest parts: {', '.join(large)}."
    remedy = (
        "Load large data inside the training function, from storage that every machine can read."
    )
    if size_bytes > MAX_PICKLE_BYTES:
        raise ShippingError(
            f"{summary} The limit is {format_bytes(MAX_PICKLE_BYTES)}.",
            do=remedy,
            size_bytes=size_bytes,
        )
    warnings.warn(f"{summary} Every worker loads a copy. {remedy}", stacklevel=2)


@contextmanager
def _register_by_value(modules: Iterable[ModuleType]) -> Iterator[set[str]]:
    """Pickle `modules` by value inside the context; yield their top-level names."""
    with _registry_lock:
        known = cloudpickle.list_registry_pickle_by_value()
        # Modules that the user has registered stay registered afterwards.
        names = {module.__name__ for module in modules} - known
        new = {name: sys.modules[name] for name in names if name in sys.modules}
        for module in new.values():
            cloudpickle.register_pickle_by_value(module)
        try:
            yield {_top_level_name(name) for name in known.union(new)}
        finally:
            for module in new.values():
                cloudpickle.unregister_pickle_by_value(module)


def _top_level_name(module_name: str) -> str:
    return module_name.partition(".")[0]


# --- Conversion of exceptions raised by user code to messages -------------------------------------


_PACKAGE_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"
# An exception may reference tensors. A larger one is reported by its traceback only.
_PICKLE_LIMIT_BYTES = 16 * 2**20


def to_failure_message(error: BaseException) -> WorkerRaised:
    """Return the message to the agent for an exception of the training function or an upload.

    It has the traceback, a pickle of the exception (empty if it cannot be pickled), and whether a
    retry would fail in the same way. Does not send it.
    """
    return WorkerRaised(
        traceback_text=format_traceback(error),
        pickled_exception=pickle_exception(error),
        is_permanent=is_permanent_error(error),
    )


def to_setup_failure_message(error: BaseException) -> WorkerRaised:
    """Return the message to the agent for an exception before the training function is called.

    For errors of a worker's setup. As `to_failure_message`, and with the diagnosed cause, such as a
    failure of the node. Does not send it.
    """
    fault = diagnose_setup_failure(error)
    return WorkerRaised(
        traceback_text=format_traceback(error),
        pickled_exception=pickle_exception(error),
        cause=fault.cause,
        is_permanent=fault.is_permanent,
    )


def format_traceback(error: BaseException) -> str:
    """Return the traceback as text, without spotfit's frames above the user's code.

    A `SpotfitError` is also shown without spotfit's frames below the user's code: its message is
    complete. Another exception keeps all frames if all are spotfit's. The text does not end with a
    line break.
    """
    is_complete = isinstance(error, SpotfitError)
    shown = _skip_own_frames(error.__traceback__)
    if shown is None and not is_complete:
        shown = error.__traceback__  # a defect of spotfit: its frames are needed
    report = traceback.TracebackException(type(error), error, shown)
    while is_complete and report.stack and _is_own_file(report.stack[-1].filename):
        report.stack.pop()
    cause = report.__cause__
    if is_complete and cause is not None and all(_is_own_file(f.filename) for f in cause.stack):
        report.__cause__ = None  # how spotfit has detected the error
    return "".join(report.format()).rstrip("\n")


def pickle_exception(error: BaseException) -> bytes:
    """Return a pickle of the exception that is known to load, or `b""` if there is none.

    An exception class that cannot be called with `args` alone is rebuilt without calling
    `__init__`, and without attributes that cannot be pickled. Pickles above 16 MiB are dropped.
    """
    return _pickle_round_trip(error) or _pickle_round_trip(_ExceptionState.of(error))


class _ExceptionState:
    """Type, args and picklable attributes of an exception; unpickles as the exception itself."""

    def __init__(
        self, exception_type: type[BaseException], args: Any, attributes: dict[str, Any]
    ) -> None:
        self._parts = (exception_type, args, attributes)

    @classmethod
    def of(cls, error: BaseException) -> _ExceptionState:
        attributes = {
            name: value for name, value in vars(error).items() if _pickle_round_trip(value)
        }
        return cls(type(error), error.args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_exception, self._parts)


# Pickles of exceptions refer to this function by name: renaming it breaks stored ones.
def _rebuild_exception(
    exception_type: type[BaseException], args: Any, attributes: dict[str, Any]
) -> Any:
    # Without __init__, which may require arguments that are not in `args`.
    error = exception_type.__new__(exception_type, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _pickle_round_trip(value: object) -> bytes:
    try:
        body: bytes = cloudpickle.dumps(value)
        loaded = pickle.loads(body)  # noqa: S301 - written in the previous line
        if isinstance(loaded, BaseException):
            str(loaded)  # a user's __str__ may depend on attributes that were not pickled
    except Exception:  # noqa: BLE001 - the user's own __reduce__ or __init__ may raise anything
        return b""
    return body if len(body) <= _PICKLE_LIMIT_BYTES else b""


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and _is_own_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _is_own_file(path: str) -> bool:
    return path.startswith(_PACKAGE_PREFIX)
