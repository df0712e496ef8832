"""Functions and callable classes of the user: their arguments, identity, and calls."""

from __future__ import annotations

import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from spotfit.code.fingerprint import fingerprint_definition, fingerprint_function, stable_repr
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import did_you_mean
from spotfit.core.lazy_names import is_loaded_instance
from spotfit.data.context import ActorPoolStrategy, TaskPoolStrategy, check_pool_size
from spotfit.host import log


class ResourceOptions(TypedDict, total=False):
    """Ray's arguments about resources, which are accepted by every method that has them in Ray."""

    compute: Any
    concurrency: Any
    num_cpus: float | None
    num_gpus: float | None
    memory: float | None
    label_selector: Any
    fallback_strategy: Any
    max_calls: int | None
    resources: Any
    accelerator_type: str | None
    runtime_env: Any
    ray_remote_args_fn: Any


class FunctionOptions(ResourceOptions, total=False):
    """Ray's arguments of methods that call a function of the user."""

    fn_args: Iterable[Any] | None
    fn_kwargs: Mapping[str, Any] | None
    fn_constructor_args: Iterable[Any] | None
    fn_constructor_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A function or a callable class, with the arguments of its calls. Immutable."""

    name: str
    """Such as "map_batches(normalize)", for messages."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    constructor_args: tuple[Any, ...]
    constructor_kwargs: Mapping[str, Any]
    identity: str
    """Hash of code and arguments, as far as they are plain data."""

    @property
    def captured(self) -> tuple[Any, ...]:
        """The function and its arguments."""
        values = (self.function, self.args, self.kwargs)
        return (*values, self.constructor_args, self.constructor_kwargs)

    def bind(self) -> Callable[..., Any]:
        """Return the function of one value; creates the instance of a callable class.

        Exceptions of the user's code have a note that names the method and the function.
        """
        call = self.function
        if inspect.isclass(call):
            call = self._noted(call)(*self.constructor_args, **self.constructor_kwargs)
        return self._noted(partial(self._call, call))

    def _call(self, function: Callable[..., Any], *values: Any) -> Any:
        if not _reports_unknown_columns.get():
            return function(*values, *self.args, **self.kwargs)
        batch, *others = values
        if isinstance(batch, dict):
            batch = _KnownColumns(batch, self.name)
        try:
            return function(batch, *others, *self.args, **self.kwargs)
        except (KeyError, AttributeError) as error:
            column = _missing_column(error, batch)
            if column is None:
                raise
            raise _unknown_column_error(self.name, column, batch) from error

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                error.add_note(f"Raised in {self.name} of a dataset.")
                raise

        return noted_call


_reports_unknown_columns: ContextVar[bool] = ContextVar("reports_unknown_columns", default=False)
_ARROW_FIELD = re.compile('Field "(.*)" does not exist in schema')
_PANDAS_COLUMNS = re.compile(r"^None of \[Index\(\[|not in index$")
_QUOTED = re.compile("'(.*?)'")


@contextmanager
def unknown_columns_reported() -> Iterator[None]:
    """Let functions raise `ConfigError` where they read a column that their rows do not have.

    Dictionaries are of a subclass within the block, so that a lookup in another one is not mistaken
    for it. Libraries may treat a subclass in another way: call the functions without it first.
    """
    token = _reports_unknown_columns.set(True)
    try:
        yield
    finally:
        _reports_unknown_columns.reset(token)


class _KnownColumns(dict[str, Any]):
    """A row or batch that raises `ConfigError` for a column that it does not have."""

    def __init__(self, columns: dict[str, Any], name: str) -> None:
        super().__init__(columns)
        self._name = name

    def __missing__(self, column: Any) -> Any:
        raise _unknown_column_error(self._name, column, self)


def _missing_column(error: KeyError | AttributeError, batch: Any) -> Any:
    """Return the column that a DataFrame or Arrow table does not have; None for other errors."""
    if isinstance(error, AttributeError):
        is_column = is_loaded_instance(batch, "pandas", "DataFrame") and error.obj is batch
        return error.name if is_column else None
    key = error.args[0] if error.args else None
    if is_loaded_instance(batch, "pyarrow", "Table"):
        found = _ARROW_FIELD.fullmatch(str(key))
        return found[1] if found and found[1] not in batch.column_names else None
    if is_loaded_instance(batch, "pandas", "DataFrame") and key not in batch.columns:
        # Of several columns the message names those that are missing.
        if _PANDAS_COLUMNS.search(str(key)):
            named = (name for name in _QUOTED.findall(str(key)) if name not in batch.columns)
            key = next(named, key)
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        # Of the batch, not of another frame that the function uses.
        return key if any(frame is batch for frame in frames) else None
    return None


def _unknown_column_error(name: str, column: Any, batch: Any) -> ConfigError:
    columns = getattr(batch, "column_names", None) or list(batch)
    return ConfigError(
        f"{name}: there is no column {column!r}.",
        do=did_you_mean(str(column), map(str, columns)) or "The rows have no columns.",
    )


def user_function(method: str, function: Any, options: Mapping[str, Any]) -> UserFunction:
    """Return the function of a call such as `map(function, **options)`, with `FunctionOptions`.

    Raises `ConfigError` if it is not callable, asynchronous, or requests GPUs.
    """
    name = f"{method}({_short_name(function)})"
    _check_callable(name, function)
    check_resources(name, options)
    constructor_args = tuple(options.get("fn_constructor_args") or ())
    constructor_kwargs = dict(options.get("fn_constructor_kwargs") or {})
    if (constructor_args or constructor_kwargs) and not inspect.isclass(function):
        raise ConfigError(
            f"{name}: fn_constructor_args and fn_constructor_kwargs require a class.",
            do="Pass a class with __call__, or use fn_args and fn_kwargs.",
        )
    args, kwargs = tuple(options.get("fn_args") or ()), dict(options.get("fn_kwargs") or {})
    arguments = stable_repr((args, kwargs, constructor_args, constructor_kwargs))
    content = f"{name} {_fingerprint(function)} {arguments}"
    return UserFunction(
        name=name,
        function=function,
        args=args,
        kwargs=kwargs,
        constructor_args=constructor_args,
        constructor_kwargs=constructor_kwargs,
        identity=f"{name} {hashlib.sha256(content.encode()).hexdigest()[:16]}",
    )


_USED_OPTIONS = {
    *("compute", "concurrency", "num_gpus", "fn_args", "fn_kwargs"),
    *("fn_constructor_args", "fn_constructor_kwargs"),
}


def check_resources(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the options of a method request a GPU, or an invalid pool.

    Other resources are ignored.
    """
    if options.get("num_gpus"):
        raise ConfigError(
            f"{name} requests num_gpus={options['num_gpus']}, but transforms of a dataset use no "
            "GPU: the training process occupies it.",
            do="Compute these columns once in a run of their own with spotfit.predict(), which "
            "writes them to the bucket, and read them from there. On a machine with a GPU, move "
            "the model to the GPU inside the function and leave num_gpus out.",
        )
    ignored = sorted(set(options) - _USED_OPTIONS)
    if ignored:
        log.debug("data.argument_ignored", function=name, argument=", ".join(ignored))
    _check_pool(name, options.get("compute"), options.get("concurrency"))


def _check_pool(name: str, compute: Any, concurrency: Any) -> None:
    if isinstance(compute, ActorPoolStrategy | TaskPoolStrategy):
        return
    if compute not in (None, "tasks", "actors"):
        raise ConfigTypeError(
            f"{name}: compute={compute!r} is not a compute strategy.",
            do="Pass ActorPoolStrategy(size=...), TaskPoolStrategy(size=...) or concurrency=....",
        )
    match concurrency:
        case None:
            return
        case int():
            check_pool_size(f"{name}, concurrency", concurrency, concurrency)
        case (int() as low, int() as high, *_):
            check_pool_size(f"{name}, concurrency", low, high)
        case _:
            raise ConfigTypeError(
                f"{name}: concurrency={concurrency!r} is not a number of processes.",
                do="Pass an integer, or a tuple of the smallest and the largest number.",
            )


def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise ConfigTypeError(
            f"{name}: {function!r} is not callable.", do="Pass a function or a callable class."
        )
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is inspected
    if any(
        inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
        for code in (function, call)
    ):
        raise ConfigError(
            f"{name}: asynchronous functions are not supported.",
            do="Pass a function that calls asyncio.run() for its batch.",
        )


def _short_name(function: Any) -> str:
    if isinstance(function, partial):
        return _short_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _fingerprint(value: Any) -> str:
    """Return the fingerprint of a function, class, bound method or callable object."""
    if isinstance(value, partial) or inspect.isbuiltin(value):
        return fingerprint_function(value)
    if inspect.isfunction(value):
        return fingerprint_definition(value)
    if inspect.isclass(value):
        members = [member for _, member in sorted(vars(value).items())]
        methods = [_fingerprint(member) for member in members if inspect.isfunction(member)]
        return f"{fingerprint_definition(value)} {methods}"
    if inspect.ismethod(value):
        return f"{_fingerprint(value.__func__)} {_fingerprint(value.__self__)}"
    return f"{_fingerprint(type(value))} {stable_repr(getattr(value, '__dict__', None))}"
