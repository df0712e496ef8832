"""Finds the modules that workers will import, so that fork servers import them before they fork.

The training function reaches them in its global and closure variables, or imports them in its body.
Only modules of packages whose import is known to be safe before a fork are found: the import of
another one may start threads or connections, which a forked process lacks (docs/decisions/0064).
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import itertools
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from spotfit.code.function_pickle import project_modules
from spotfit.host import log

_AS_REACHED: tuple[str, ...] = ()
SAFE_PACKAGES: Mapping[str, tuple[str, ...]] = {
    # With what first steps import: its modules are small, and most are imported with the package.
    "jax": ("jax", "jax.numpy"),
    "lightgbm": ("lightgbm",),
    "lightning": ("lightning.pytorch",),
    "numpy": ("numpy",),
    "optax": ("optax",),
    "pandas": ("pandas",),
    "pytorch_lightning": ("pytorch_lightning",),
    "tensorflow": ("tensorflow",),
    "torch": ("torch", "torch._dynamo"),
    "xgboost": ("xgboost",),
    # Packages that import their modules on demand: those that the function reaches.
    "accelerate": _AS_REACHED,
    "datasets": _AS_REACHED,
    "deepspeed": _AS_REACHED,
    "flax": _AS_REACHED,
    "orbax": _AS_REACHED,
    "pyarrow": _AS_REACHED,
    "scipy": _AS_REACHED,
    "sklearn": _AS_REACHED,
    "torchmetrics": _AS_REACHED,
    "torchvision": _AS_REACHED,
    "transformers": _AS_REACHED,
}
"""The modules to import for each package; empty for those that the function reaches."""
# Not spotfit.tensorflow.keras: each worker's environment decides which Keras tf.keras is.
_INTEGRATIONS = {f"spotfit.{name}" for name in (*SAFE_PACKAGES, "huggingface")} - {
    "spotfit.tensorflow",
    "spotfit.torch",
}
# A configuration may contain a dataset: its first items have the same types as the others.
_MAX_ITEMS = 100
_MAX_OBJECTS = 10_000
_DEFINITIONS = (FunctionType, BuiltinFunctionType, type)
_CachedFunction = type(functools.cache(len))
_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_READING_METHODS = {"get", "items", "keys", "values", "copy"}
_READS = {"BINARY_SUBSCR", "BINARY_OP", "CONTAINS_OP"}


def find_preload_modules(*roots: Any, framework: str = "none") -> tuple[str, ...]:
    """Return the modules that processes import which unpickle `roots` and call them, sorted.

    `roots` are the training function and its configuration, or code. Imports nothing. A result such
    as "transformers.Trainer" may be an attribute that its package imports on demand. Modules that a
    function imports in its body are left out, with a log record, if a function changes environment
    variables, which libraries read when they are imported. So is the package `framework`, such as
    "torch", which is imported anyway.
    """
    search = _ModuleSearch(_user_packages(roots))
    for root in roots:
        search.visit(root)
    for names in (search.reached, search.imported):
        names.difference_update(SAFE_PACKAGES.get(framework, ()))
    if search.sets_environment and search.imported:
        log.info(
            "fit.not_preloaded",
            modules=",".join(sorted(search.imported)),
            text="the training function changes environment variables, which these modules may "
            "read when they are imported; name them in RunConfig(preload=...) if they do not",
        )
    else:
        search.reached |= search.imported
    return tuple(sorted(_add_companions(search.reached)))


def find_script_modules(script: Path, *, framework: str) -> tuple[str, ...]:
    """Return the modules that the script and its functions import, sorted, as for a function.

    Those that other modules of the project import are not found. Empty for a script that cannot be
    compiled: the workers report the error.
    """
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except SyntaxError:
        return ()
    return find_preload_modules(code, framework=framework)


def _user_packages(roots: Iterable[Any]) -> frozenset[str]:
    """Return the top-level names of modules whose code is examined."""
    tops = {_top_level(module.__name__) for module in project_modules()}
    # An installed package of the user, if the function is in one.
    tops |= {_top_level(_module_name(root)) for root in roots}
    return frozenset(tops | {"__main__"}) - SAFE_PACKAGES.keys() - sys.stdlib_module_names - {""}


def _add_companions(names: set[str]) -> set[str]:
    """Add modules that the found ones import during the first steps."""
    if any(_top_level(name) == "transformers" for name in names):
        # What the caller has loaded: auto classes import a model's module by its configuration.
        names |= {
            name
            for name in sys.modules
            if name == "transformers.trainer"
            or (name.startswith("transformers.models.") and ".modeling_" in name)
        }
    # Accelerate imports it, if it is installed, at the first unwrapping of a model.
    if any(_top_level(name) in ("accelerate", "transformers") for name in names):
        names |= {"deepspeed"} if importlib.util.find_spec("deepspeed") else set()
    return names


class _ModuleSearch:
    """Searches the objects that a pickle of a function refers to."""

    def __init__(self, user_packages: frozenset[str]) -> None:
        self.reached: set[str] = set()
        """Modules in global and closure variables, which the unpickling imports."""
        self.imported: set[str] = set()
        """Modules that functions import in their bodies."""
        self.sets_environment = False
        self._user_packages = user_packages
        # References to the objects: the id of a deleted one could be reused.
        self._visited: dict[int, Any] = {}

    def visit(self, root: Any) -> None:
        """Search `root` and what it refers to."""
        pending = [root]
        while pending and len(self._visited) < _MAX_OBJECTS:
            value = pending.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._visited:
                self._visited[id(value)] = value
                pending += self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        match value:
            case dict():
                yield from itertools.islice(dict.values(value), _MAX_ITEMS)
            case list() | tuple():
                yield from value[:_MAX_ITEMS]
            case functools.partial():
                yield from (value.func, value.args, value.keywords)
            case _CachedFunction():
                yield value.__wrapped__
            case MethodType():
                yield from (value.__self__, value.__func__)
            case staticmethod() | classmethod():
                yield value.__func__
            case property():
                yield from filter(None, (value.fget, value.fset, value.fdel))
            case ModuleType():
                yield from self._module_parts(value)
            case CodeType():
                yield from self._code_parts(value, {})
            case _:
                yield from self._definition_parts(value)

    def _module_parts(self, module: ModuleType) -> Iterator[Any]:
        if self._is_user_code(module.__name__):
            # What it imports. Its functions are visited if they are referred to.
            for value in list(vars(module).values()):
                if isinstance(value, ModuleType) or not self._is_user_code(_module_name(value)):
                    yield value
        else:
            _add(self.reached, module.__name__)

    def _definition_parts(self, value: Any) -> Iterator[Any]:
        """Return what a function, a class or an instance refers to, if it is the user's."""
        name = _module_name(value)
        if not isinstance(value, _DEFINITIONS):
            yield type(value)
            if self._is_user_code(name) and hasattr(value, "__dict__"):
                yield vars(value)
            return
        if not self._is_user_code(name):
            _add(self.reached, name)
            return
        # Only `__main__` is never imported by workers.
        if name != "__main__" and name in sys.modules:
            yield sys.modules[name]
        if isinstance(value, type):
            yield from (value.__bases__, dict(vars(value)))
        elif isinstance(value, FunctionType):
            yield from self._function_parts(value)

    def _function_parts(self, function: FunctionType) -> Iterator[Any]:
        yield from (function.__defaults__, function.__kwdefaults__)
        closure: dict[str, Any] = {}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # the variable is not bound yet
                closure[name] = cell.cell_contents
        yield from self._code_parts(function.__code__, ChainMap(closure, function.__globals__))

    def _code_parts(self, code: CodeType, variables: Mapping[str, Any]) -> Iterator[Any]:
        for reference in _references(code):
            match reference:
                case _Import(module, level):
                    yield from self._import(module, level, variables)
                case _Variable(name, attributes) if name in variables:
                    yield self._follow(variables[name], attributes)
                case _EnvironmentChange():
                    self.sets_environment = True

    def _follow(self, value: Any, attributes: tuple[str, ...]) -> Any:
        """Return what `value.attribute…` is as far as modules can be followed, importing none."""
        for attribute in attributes:
            if not isinstance(value, ModuleType):
                break
            if attribute not in vars(value):  # the package imports it on demand
                _add(self.reached, f"{value.__name__}.{attribute}")
                break
            value = vars(value)[attribute]
        return value

    def _import(self, name: str, level: int, variables: Mapping[str, Any]) -> Iterator[ModuleType]:
        if level and (package := variables.get("__package__")):
            name = f"{package.rsplit('.', level - 1)[0]}.{name}"
        if not self._is_user_code(name):
            _add(self.imported, name)
        elif name in sys.modules:
            yield sys.modules[name]

    def _is_user_code(self, module: str) -> bool:
        return _top_level(module) in self._user_packages


def _add(names: set[str], name: str) -> None:
    """Add a module, or those that represent its package, if its import is safe before a fork."""
    if ".".join(name.split(".")[:2]) in _INTEGRATIONS:
        names.add(name)
    elif (package := _top_level(name)) in SAFE_PACKAGES:
        names.update(SAFE_PACKAGES[package] or (name,))


def _module_name(value: Any) -> str:
    """Return the module that defines a function, a class or the class of an object, else ""."""
    name = value.__module__ if isinstance(value, _DEFINITIONS) else type(value).__module__
    return name if isinstance(name, str) else ""


def _top_level(module: str) -> str:
    return module.partition(".")[0]


# --- The code of a function -----------------------------------------------------------------------


class _Variable(NamedTuple):
    """`name.attribute…`, a global or closure variable."""

    name: str
    attributes: tuple[str, ...]


class _Import(NamedTuple):
    """`import module`, or `from module import name` as "module.name"."""

    module: str
    level: int


class _EnvironmentChange(NamedTuple):
    """A change of `os.environ`."""


def _references(code: CodeType) -> Iterator[_Variable | _Import | _EnvironmentChange]:
    """Return what the code refers to, and the code of its inner functions."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for n, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            yield _Variable(step.argval, tuple(_attributes(steps[n + 1 :])))
        elif step.opname == "IMPORT_NAME":
            # The instructions before load the level and the names of `from module import …`.
            level, names = steps[n - 2].argval, steps[n - 1].argval
            for name in names or ():
                yield _Import(f"{step.argval}.{name}" if step.argval else name, level)
            if step.argval:
                yield _Import(step.argval, level)
        if step.argval in ("environ", "putenv") and _changes_environment(steps[n:]):
            yield _EnvironmentChange()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _references(constant)


def _attributes(steps: list[dis.Instruction]) -> Iterator[str]:
    for step in steps:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield step.argval


def _changes_environment(steps: list[dis.Instruction]) -> bool:
    """Return whether `os.environ`, the first instruction, is used other than to read a variable."""
    use = steps[1:3]  # a method, `in`, or a key and its use
    is_read = use[0].argval in _READING_METHODS or any(one.opname in _READS for one in use)
    return steps[0].argval == "putenv" or not is_read
