"""`Preprocessor`: what all preprocessors share, and the base class for the user's own."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from spotfit.code.fingerprint import fingerprint_definition, fingerprint_function, stable_repr
from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.formats.batch_formats import to_batch, to_block
from spotfit.data.plans.transforms import (
    BlockFunction,
    ColumnTransform,
    set_column,
)
from spotfit.data.preprocessors import preprocessor_json
from spotfit.data.preprocessors.batch_kinds import BatchFormat, block_of, format_of, with_result
from spotfit.data.preprocessors.column_statistics import (
    Results,
    Statistic,
    fold_states,
    observe_all,
)
from spotfit.data.preprocessors.fit_cache import FitCache
from spotfit.data.schema import check_columns

if TYPE_CHECKING:
    from spotfit.data.preprocessors.batch_kinds import Batch


class PreprocessorNotFittedException(ConfigError, RuntimeError):  # noqa: N818 - the name of Ray
    """A preprocessor was asked to transform before `fit`."""


class Preprocessor:
    """A transform of rows that may be fitted to a dataset first.

    Own preprocessors define `_transform_pandas`, `_transform_numpy` or `_transform_arrow`, and
    either `_fit(dataset)`, which sets `stats_` and returns `self`, or `_is_fittable = False`.
    """

    class FitStatus(StrEnum):
        """Whether a preprocessor needs `fit`, and whether it was called."""

        NOT_FITTABLE = "NOT_FITTABLE"
        NOT_FITTED = "NOT_FITTED"
        PARTIALLY_FITTED = "PARTIALLY_FITTED"
        """Some parts of a `Chain` are fitted, others are not."""
        FITTED = "FITTED"

    _is_fittable: bool = True
    _fitted: bool = False

    def __init__(self) -> None:
        self.stats_: dict[str, Any] = {}

    # ── fitting ──

    def fit_status(self) -> FitStatus:
        """Return whether `fit` is needed and was called."""
        if not self._is_fittable:
            return self.FitStatus.NOT_FITTABLE
        fitted = self._fitted or self.has_stats()
        return self.FitStatus.FITTED if fitted else self.FitStatus.NOT_FITTED

    def has_stats(self) -> bool:
        """Return whether there are statistics."""
        return bool(getattr(self, "stats_", None))

    def fit(self, ds: Dataset) -> Self:
        """Compute the statistics of a dataset, and return this preprocessor.

        Reads all rows once. A second call warns and replaces the statistics. Raises `ConfigError`
        if a column is missing or has an unsuitable type or values.
        """
        if self.fit_status() is self.FitStatus.NOT_FITTABLE:
            return self
        self._warn_if_fitted(stacklevel=3)
        self._fit(ds)
        self._fitted = True
        return self

    def _warn_if_fitted(self, *, stacklevel: int) -> None:
        if self.fit_status() in (self.FitStatus.FITTED, self.FitStatus.PARTIALLY_FITTED):
            warnings.warn(
                f"fit() was called before on {type(self).__name__} or a part of it; the earlier "
                "statistics are replaced.",
                stacklevel=stacklevel,
            )

    def fit_transform(
        self,
        ds: Dataset,
        *,
        transform_num_cpus: float | None = None,
        transform_memory: float | None = None,
        transform_batch_size: int | None = None,
        transform_concurrency: int | None = None,
    ) -> Dataset:
        """Return `fit(ds).transform(ds)`; the other arguments are those of `transform`."""
        return self.fit(ds).transform(
            ds,
            num_cpus=transform_num_cpus,
            memory=transform_memory,
            batch_size=transform_batch_size,
            concurrency=transform_concurrency,
        )

    def _fit(self, ds: Dataset) -> Preprocessor:
        fit_together([self], ds)
        return self

    def statistics(self) -> Sequence[Statistic]:
        """Return what `fit` has to compute; for preprocessors of this package."""
        raise TypeError(f"{type(self).__name__} defines neither _fit() nor _is_fittable = False.")

    def set_results(self, results: Results) -> None:
        """Set `stats_` from the results of `statistics`."""
        self.stats_ = self._stats_of(results)
        self._fitted = True

    def _stats_of(self, _results: Results) -> dict[str, Any]:
        return {}

    @property
    def is_fittable(self) -> bool:
        """Whether `transform` needs `fit` before."""
        return self._is_fittable

    @property
    def shares_fit(self) -> bool:
        """Whether the fit is that of this class, so that it can share a pass with others."""
        return not self._defines("_fit")

    # ── transforming ──

    def transform(
        self,
        ds: Dataset,
        *,
        batch_size: int | None = None,
        num_cpus: float | None = None,
        memory: float | None = None,
        concurrency: int | None = None,
    ) -> Dataset:
        """Return the dataset with this transform, which is applied while rows are read.

        The other arguments of Ray are accepted and have no effect: blocks are transformed where
        they are read. A later `fit` does not change the dataset. Raises
        `PreprocessorNotFittedException` if `fit` is missing.
        """
        self._require_fitted("transform")
        snapshot = self.snapshot()
        if isinstance(snapshot, ArrowPreprocessor) and snapshot.knows_columns:
            return ds.with_transform(KnownColumnsTransform(snapshot))
        return ds.with_transform(PreprocessorTransform(snapshot))

    def transform_batch(self, data: Batch) -> Any:
        """Return a transformed batch of the same kind: DataFrame, dictionary or Arrow table.

        Raises `PreprocessorNotFittedException` if `fit` is missing.
        """
        self._require_fitted("transform_batch")
        if direct := self._direct_transform(format_of(data)):
            return direct(data)
        known = self.knows_columns
        block = block_of(data, self.get_input_columns() if known else None)
        result = self.transform_block(block)
        outputs = self.get_output_columns() if known else result.column_names
        return with_result(data, result, outputs, block.column_names)

    def _direct_transform(self, kind: BatchFormat) -> Any:
        # The user's own function for this kind of batch, which may modify its argument.
        if kind is BatchFormat.PANDAS and self._defines("_transform_pandas"):
            return lambda frame: self._transform_pandas(frame.copy())
        if kind is BatchFormat.NUMPY and self._defines("_transform_numpy"):
            return lambda arrays: self._transform_numpy(dict(arrays))
        return None

    def _defines(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Preprocessor, method)

    def _require_fitted(self, method: str) -> None:
        if self.fit_status() in (self.FitStatus.NOT_FITTED, self.FitStatus.PARTIALLY_FITTED):
            raise PreprocessorNotFittedException(
                f"fit() must be called before {method}() of {type(self).__name__}.",
                do="Call fit(dataset) first, or fit_transform(dataset).",
            )

    def transform_block(self, block: pa.Table) -> pa.Table:
        """Return the transformed rows. Requires `fit`."""
        kinds = {
            BatchFormat.ARROW: "_transform_arrow",
            BatchFormat.NUMPY: "_transform_numpy",
            BatchFormat.PANDAS: "_transform_pandas",
        }
        defined = [kind for kind, method in kinds.items() if self._defines(method)]
        preferred = self.preferred_batch_format()
        match preferred if preferred in defined else next(iter(defined), None):
            case BatchFormat.ARROW:
                return self._transform_arrow(block)
            case BatchFormat.NUMPY:
                return to_block(self._transform_numpy(to_batch(block, "numpy")))
            case BatchFormat.PANDAS:
                return to_block(self._transform_pandas(to_batch(block, "pandas")))
            case _:
                raise TypeError(f"{type(self).__name__} defines no _transform_pandas().")

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        raise TypeError(f"{type(self).__name__} defines no _transform_arrow().")

    def _transform_pandas(self, df: Any) -> Any:
        raise TypeError(f"{type(self).__name__} defines no _transform_pandas().")

    def _transform_numpy(self, np_data: Any) -> Any:
        raise TypeError(f"{type(self).__name__} defines no _transform_numpy().")

    def snapshot(self) -> Preprocessor:
        """Return a copy that a later `fit` does not change."""
        # fit() replaces `stats_`, and never modifies it.
        return copy.copy(self)

    # ── description ──

    @classmethod
    def preferred_batch_format(cls) -> BatchFormat:
        """Return the kind of batches that `_transform_*` is called with if several are defined."""
        return BatchFormat.PANDAS

    def get_input_columns(self) -> list[str]:
        """Return the columns that are read; [] if that is unknown."""
        return list(getattr(self, "columns", []))

    def get_output_columns(self) -> list[str]:
        """Return the columns that are written; [] if that is unknown."""
        return list(getattr(self, "output_columns", []))

    def removed_columns(self) -> set[str]:
        """Return the columns that the result has no more."""
        return set()

    @property
    def knows_columns(self) -> bool:
        """Whether the methods that return columns are complete."""
        return False

    @property
    def runs_user_code(self) -> bool:
        """Whether functions or classes of the user are called."""
        return True

    # ── storage ──

    def to_json(self) -> str:
        """Return class, parameters and statistics as JSON.

        Raises `ConfigError` for preprocessors with code: functions, and classes of the user.
        """
        return preprocessor_json.dump(self)

    @staticmethod
    def from_json(text: str | bytes) -> Preprocessor:
        """Return the preprocessor of `to_json`. Runs no code of the text.

        Raises `ConfigError` for an unknown class or version, or if the text is damaged.
        """
        preprocessor: Preprocessor = preprocessor_json.load(text)
        return preprocessor

    def serialize(self) -> str | bytes:
        """Return JSON text; bytes with a pickle for preprocessors with code.

        Raises `ShippingError` if such code cannot be pickled.
        """
        return preprocessor_json.serialize(self)

    @staticmethod
    def deserialize(serialized: str | bytes, *, trusted: bool = False) -> Preprocessor:
        """Return the preprocessor of `serialize`.

        A pickle runs code when it is read: it is refused (`ConfigError`) unless `trusted`.
        """
        preprocessor: Preprocessor = preprocessor_json.deserialize(serialized, trusted=trusted)
        return preprocessor


class ArrowPreprocessor(Preprocessor):
    """Base of the preprocessors of this package, whose state is data."""

    _parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor's parameters, which are attributes of the same name."""

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {name: getattr(self, name) for name in self._parameters}

    @classmethod
    def preferred_batch_format(cls) -> BatchFormat:
        """Return Arrow: blocks are not converted."""
        return BatchFormat.ARROW

    @property
    def knows_columns(self) -> bool:
        """Whether the methods that return columns are complete."""
        return True

    def required_columns(self) -> list[str]:
        """Return the input columns without which the transform fails."""
        return self.get_input_columns()

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the result for these columns. Raises `ConfigError`."""
        check_columns(f"{type(self).__name__}.transform()", self.required_columns(), names)
        kept = [name for name in names if name not in self.removed_columns()]
        return [*kept, *(name for name in self.get_output_columns() if name not in kept)]

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the columns that are read to compute the columns `needed` of the result."""
        written = set(self.get_output_columns())
        kept = [name for name in needed if name not in written]
        return [*kept, *(name for name in self.get_input_columns() if name not in kept)]

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Return an instance that is not fitted."""
        return cls(**parameters)

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called."""
        return False

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self.parameters().items()]
        return f"{type(self).__name__}({', '.join(arguments)})"


class ColumnPreprocessor(ArrowPreprocessor):
    """Base of preprocessors that transform some columns, one by one."""

    _parameters: ClassVar[tuple[str, ...]] = ("columns", "output_columns")

    def __init__(self, columns: Sequence[str], output_columns: Sequence[str] | None = None) -> None:
        super().__init__()
        self.columns = column_names(columns)
        self.output_columns = column_names(output_columns or columns)
        if len(self.columns) != len(self.output_columns):
            raise ConfigError(
                f"Invalid output_columns: columns has {len(self.columns)} names, output_columns "
                f"has {len(self.output_columns)}.",
                do="Pass one output column for each column, or none.",
            )

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        result = table
        for name, output in zip(self.columns, self.output_columns, strict=True):
            # Columns are read from the original table: an output may have the name of an input.
            result = set_column(result, output, self._transform_column(table, name))
        return result

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
        raise TypeError(f"{type(self).__name__} defines no _transform_column().")


def column_names(columns: Sequence[str]) -> list[str]:
    """Return a list of names. Raises `ConfigError` for a single text, or what is not a name."""
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"columns must be a list of column names, not {columns!r}.",
            do="Pass a list, such as ['price'].",
        )
    return list(columns)


@dataclass(frozen=True, eq=False)
class PreprocessorTransform:
    """A fitted preprocessor as a transform of a dataset."""

    preprocessor: Preprocessor

    @property
    def name(self) -> str:
        """The class and `transform`."""
        return f"{type(self.preprocessor).__name__}.transform"

    @property
    def runs_user_code(self) -> bool:
        """Whether the preprocessor has a function or is a class of the user."""
        return self.preprocessor.runs_user_code

    @cached_property
    def identity(self) -> str:
        """Class and digest of parameters, statistics and code."""
        return f"{self.name} {preprocessor_digest(self.preprocessor)}"

    def bind(self) -> BlockFunction:
        """Return the function for blocks."""
        return self.preprocessor.transform_block


@dataclass(frozen=True, eq=False)
class KnownColumnsTransform(PreprocessorTransform, ColumnTransform):
    """A preprocessor whose columns are known, so that columns which nothing needs are not read."""

    preprocessor: ArrowPreprocessor

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the result. Raises `ConfigError` if one is missing."""
        return self.preprocessor.output_names(names)

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the needed columns that are not written, and all that are read."""
        return self.preprocessor.input_names(needed)


def preprocessor_digest(preprocessor: Preprocessor) -> str:
    """Return a hexadecimal SHA-256 of what determines the result: data, and the user's code.

    It is equal in every process, and objects of the user count by their class only.
    """
    try:
        content = preprocessor.to_json()
    except ConfigError:
        content = _fingerprint_code(preprocessor)
    return hashlib.sha256(content.encode()).hexdigest()


def _fingerprint_code(preprocessor: Preprocessor) -> str:
    if isinstance(preprocessor, ArrowPreprocessor):
        values = preprocessor.parameters()
    else:
        values = vars(preprocessor)
    texts = [f"{name}={_fingerprint(value)}" for name, value in values.items()]
    stats = stable_repr(getattr(preprocessor, "stats_", {}))
    return f"{fingerprint_definition(type(preprocessor))} {texts} {stats}"


def _fingerprint(value: Any) -> str:
    if isinstance(value, Preprocessor):
        return preprocessor_digest(value)
    return fingerprint_function(value) if callable(value) else stable_repr(value)


def fit_together(preprocessors: Sequence[Preprocessor], ds: Dataset) -> None:
    """Fit preprocessors of this package to the same rows, which are read once.

    Statistics that were computed before for the same rows, class and parameters are not computed
    again: nothing is read if all are known.
    """
    cache = FitCache(ds)
    missing = [one for one in preprocessors if not cache.restore(one)]
    results = fold_dataset([one for part in missing for one in part.statistics()], ds)
    for one in missing:
        one.set_results(results)
        cache.store(one)


def fold_dataset(statistics: Iterable[Statistic], ds: Dataset) -> dict[Statistic, Any]:
    """Return the results of all statistics, for which the dataset is read once.

    Blocks are observed in threads where files are read; states are merged in the order of the
    units.
    """
    distinct = list(dict.fromkeys(statistics))
    if not distinct:
        return {}
    columns = _columns_to_read(ds, list(dict.fromkeys(one.column for one in distinct)))
    return fold_states(distinct, ds.map_blocks(partial(observe_all, distinct), columns))


def _columns_to_read(ds: Dataset, columns: list[str]) -> list[str] | None:
    if not all(isinstance(transform, ColumnTransform) for transform in ds.transforms):
        return None  # whether it has the columns is known only when rows are read
    ds.columns_to_read(columns)  # raises an error for missing ones
    return columns
