"""What all preprocessors share: fitting, batches, own classes, descriptions."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data import Preprocessor, from_arrow
from spotfit.data.preprocessor import PreprocessorNotFittedException
from spotfit.data.preprocessors import (
    Chain,
    Concatenator,
    LabelEncoder,
    MinMaxScaler,
    Normalizer,
    SimpleImputer,
    StandardScaler,
    Tokenizer,
)
from spotfit.data.preprocessors.column_statistics import BoundsStatistic, MomentsStatistic
from spotfit.data.preprocessors.preprocessor_base import (
    PreprocessorTransform,
    fold_dataset,
    preprocessor_digest,
)
from tests.house.tree import ROOT
from tests.unit.data.preprocessors.rows import dataset, output, rows_of

STATUS = Preprocessor.FitStatus
ROWS = {"x": [1.0, 3.0, None], "y": [0, 0, 1]}


class Doubler(Preprocessor):
    """A preprocessor of a user, without a fit."""

    _is_fittable = False

    def _transform_pandas(self, df: Any) -> Any:
        df["x"] = df["x"] * 2
        return df


class Shift(Preprocessor):
    """A preprocessor of a user, with a fit of its own."""

    def _fit(self, ds: Any) -> Preprocessor:
        self.stats_ = {"least": min(rows_of(ds)["y"].to_pylist())}
        return self

    def _transform_numpy(self, np_data: Any) -> Any:
        return {**np_data, "y": np_data["y"] - self.stats_["least"]}


def test_fit_sets_the_statistics() -> None:
    scaler = StandardScaler(["x"])
    assert (scaler.fit_status(), scaler.has_stats()) == (STATUS.NOT_FITTED, False)
    assert scaler.fit(dataset(ROWS)) is scaler
    assert (scaler.fit_status(), scaler.has_stats()) == (STATUS.FITTED, True)
    assert scaler.stats_ == {"mean(x)": 2.0, "std(x)": 1.0}


def test_a_second_fit_warns_and_replaces_the_statistics() -> None:
    scaler = StandardScaler(["x"]).fit(dataset(ROWS))
    with pytest.warns(UserWarning, match="fit\\(\\) was called before") as caught:
        scaler.fit(dataset({"x": [5.0]}))
    assert scaler.stats_ == {"mean(x)": 5.0, "std(x)": 0.0}
    assert caught[0].filename == __file__


def test_fit_of_a_preprocessor_without_state_does_nothing() -> None:
    normalizer = Normalizer(["no such column"])
    assert normalizer.fit(dataset(ROWS)) is normalizer
    assert normalizer.fit_status() is STATUS.NOT_FITTABLE


@pytest.mark.parametrize("method", ["transform", "transform_batch"])
def test_transforming_before_fit_is_an_error(method: str) -> None:
    with pytest.raises(PreprocessorNotFittedException, match=rf"before {method}\(\) of Standard"):
        getattr(StandardScaler(["x"]), method)(dataset(ROWS))


def test_the_error_is_also_that_of_ray() -> None:
    assert issubclass(PreprocessorNotFittedException, RuntimeError)
    assert issubclass(PreprocessorNotFittedException, ConfigError)


def test_a_later_fit_does_not_change_a_dataset() -> None:
    scaler = StandardScaler(["x"])
    transformed = scaler.fit_transform(dataset(ROWS))
    with warnings.catch_warnings(action="ignore"):
        scaler.fit(dataset({"x": [100.0, 300.0]}))
    assert rows_of(transformed)["x"].to_pylist() == [-1.0, 1.0, None]


def test_outputs_beside_the_inputs_are_computed_from_the_inputs() -> None:
    scaler = MinMaxScaler(["x", "y"], output_columns=["y", "z"]).fit(dataset(ROWS))
    table = rows_of(scaler.transform(dataset(ROWS)))
    assert table.to_pydict() == {
        "x": [1.0, 3.0, None],
        "y": [0.0, 1.0, None],
        "z": [0.0, 0.0, 1.0],
    }


def test_only_the_columns_of_the_statistics_are_read() -> None:
    read = []
    ds = dataset(ROWS)
    map_blocks = type(ds).map_blocks

    class Recorded(type(ds)):  # type: ignore[misc]
        def map_blocks(self, function: Any, columns: Any = None) -> Any:
            read.append(columns)
            return map_blocks(self, function, columns)

    StandardScaler(["x"]).fit(Recorded(ds._plan))
    assert read == [["x"]]


@pytest.mark.parametrize("columns", ["x", [1], None])
def test_columns_must_be_a_list_of_names(columns: Any) -> None:
    with pytest.raises((ConfigError, TypeError)):
        StandardScaler(columns)


def test_output_columns_must_match_the_columns() -> None:
    with pytest.raises(ConfigError, match="Invalid output_columns"):
        StandardScaler(["x", "y"], output_columns=["z"])


def test_a_column_that_does_not_exist_is_named_before_rows_are_read() -> None:
    with pytest.raises(ConfigError, match="there is no column 'z'"):
        StandardScaler(["z"]).fit(dataset(ROWS))


def test_a_column_that_a_transform_removed_is_named() -> None:
    ds = Concatenator(["x"]).transform(dataset(ROWS))
    with pytest.raises(ConfigError, match="no column 'x'"):
        StandardScaler(["x"]).fit(ds)


# ── batches ──


def test_a_batch_of_arrow_comes_back_as_arrow() -> None:
    scaler = StandardScaler(["x"]).fit(dataset(ROWS))
    result = scaler.transform_batch(pa.table({"x": [2.0, 4.0], "s": ["a", "b"]}))
    assert result == pa.table({"x": [0.0, 2.0], "s": ["a", "b"]})


def test_a_batch_of_arrays_comes_back_as_arrays() -> None:
    scaler = StandardScaler(["x"], output_columns=["z"]).fit(dataset(ROWS))
    batch = {"x": np.array([2, 4]), "image": np.zeros((2, 3, 3))}
    result = scaler.transform_batch(batch)
    assert result["z"].tolist() == [0.0, 2.0]
    assert result["image"] is batch["image"]
    assert list(batch) == ["x", "image"]


def test_a_frame_comes_back_with_its_index_and_other_columns() -> None:
    scaler = StandardScaler(["x"]).fit(dataset(ROWS))
    frame = pd.DataFrame({"x": [2.0, None], "o": [object(), object()]}, index=[7, 8])
    result = scaler.transform_batch(frame)
    assert list(result.index) == [7, 8]
    assert result["x"].iloc[0] == 0.0
    assert pd.isna(result["x"].iloc[1])
    assert list(result["o"]) == list(frame["o"])
    assert frame["x"].iloc[0] == 2.0


def test_removed_columns_are_removed_from_batches() -> None:
    concatenator = Concatenator(["a", "b"], "v")
    batch = {"a": np.array([1, 2]), "b": np.array([3, 4]), "c": np.array([5, 6])}
    result = concatenator.transform_batch(batch)
    assert list(result) == ["c", "v"]
    assert result["v"].tolist() == [[1, 3], [2, 4]]
    frame = concatenator.transform_batch(pd.DataFrame(batch))
    assert list(frame.columns) == ["c", "v"]
    assert [row.tolist() for row in frame["v"]] == [[1, 3], [2, 4]]


def test_lists_of_a_batch_come_back_as_lists() -> None:
    result = Tokenizer(["t"]).transform_batch({"t": np.array(["a b", "c"])})
    assert [list(tokens) for tokens in result["t"]] == [["a", "b"], ["c"]]


def test_other_batches_are_rejected() -> None:
    with pytest.raises(ConfigError, match="not a list"):
        Normalizer(["x"]).transform_batch([1, 2])


# ── the user's own classes ──


def test_an_own_class_transforms_datasets_and_batches() -> None:
    assert output(Doubler(), {"x": [1, 2]}, "x") == [2, 4]
    frame = pd.DataFrame({"x": [1, 2]})
    assert list(Doubler().transform_batch(frame)["x"]) == [2, 4]
    assert list(frame["x"]) == [1, 2]
    assert Doubler().transform_batch({"x": np.array([3])})["x"].tolist() == [6]
    assert Doubler().transform_batch(pa.table({"x": [3]})) == pa.table({"x": [6]})


def test_an_own_fit_is_called() -> None:
    shift = Shift().fit(dataset({"y": [5, 4]}))
    assert shift.fit_status() is STATUS.FITTED
    assert output(shift, {"y": [5, 4]}, "y") == [1, 0]


def test_an_own_class_must_define_a_transform() -> None:
    class Empty(Preprocessor):
        _is_fittable = False

    with pytest.raises(TypeError, match="Empty defines no _transform_pandas"):
        rows_of(Empty().transform(dataset(ROWS)))


def test_an_own_class_must_define_a_fit() -> None:
    class Empty(Preprocessor):
        pass

    with pytest.raises(TypeError, match="Empty defines neither _fit"):
        Empty().fit(dataset(ROWS))


# ── as a transform ──


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        (SimpleImputer(["x"], "constant", 0), False),
        (Tokenizer(["x"]), False),
        (Tokenizer(["x"], str.split), True),
        (Doubler(), True),
    ],
)
def test_user_code_is_declared(preprocessor: Preprocessor, expected: bool) -> None:
    assert PreprocessorTransform(preprocessor).runs_user_code is expected


def test_the_identity_changes_with_the_statistics() -> None:
    first, same, other = (
        StandardScaler(["x"]).fit_transform(dataset({"x": [value]})).transforms[0]
        for value in (1.0, 1.0, 2.0)
    )
    assert first.identity == same.identity != other.identity
    assert first.name == "StandardScaler.transform"


def splitter(separator: str) -> Any:
    return lambda text: text.split(separator)


@pytest.mark.parametrize(
    ("first", "equal", "other"),
    [
        tuple(Tokenizer(["t"], splitter(one)) for one in ("-", "-", "+")),
        tuple(Chain(Tokenizer(["t"], splitter(one))) for one in ("-", "-", "+")),
        (Doubler(), Doubler(), Shift()),
    ],
)
def test_the_digest_is_that_of_the_code(
    first: Preprocessor, equal: Preprocessor, other: Preprocessor
) -> None:
    digests = [preprocessor_digest(one) for one in (first, equal, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_transformed_dataset_can_be_pickled() -> None:
    ds = StandardScaler(["x"]).fit_transform(dataset(ROWS))
    assert rows_of(pickle.loads(pickle.dumps(ds))) == rows_of(ds)


def test_the_schema_of_no_rows_is_that_of_rows() -> None:
    ds = LabelEncoder("y").fit_transform(StandardScaler(["x"]).fit_transform(dataset(ROWS)))
    schema = ds.as_source().schema(ds.as_source().list_units())
    assert schema == rows_of(ds).schema


# ── columns that are read ──


def columns_read(ds: Any, columns: list[str] | None = None) -> set[str]:
    names = ds.columns_to_read(columns)
    return set(ds.manifest.schema.names if names is None else names)


def test_columns_that_nothing_needs_are_not_read() -> None:
    rows = {"x": [1.0, 2.0], "y": [1, 2], "z": [0, 0], "unused": ["a", "b"]}
    ds = StandardScaler(["x"], output_columns=["s"]).fit_transform(dataset(rows))
    ds = Concatenator(["s", "y"], "v").transform(ds)
    assert ds.schema().names == ["x", "z", "unused", "v"]
    assert columns_read(ds) == {"x", "y", "z", "unused"}
    assert columns_read(ds, ["v"]) == {"x", "y"}
    assert columns_read(ds.select_columns(["v", "z"])) == {"x", "y", "z"}
    assert rows_of(ds.select_columns(["v"])).column_names == ["v"]


def test_columns_of_a_chain_that_nothing_needs_are_not_read() -> None:
    rows = {"x": [1.0, 2.0], "y": [1, 2], "z": [0, 0]}
    chain = Chain(StandardScaler(["x"], output_columns=["s"]), Concatenator(["s", "y"], "v"))
    ds = chain.fit_transform(dataset(rows))
    assert ds.schema().names == ["x", "z", "v"]
    assert columns_read(ds, ["v"]) == {"x", "y"}
    assert columns_read(ds, ["z"]) == {"x", "y", "z"}


def test_a_missing_column_is_named_without_reading_rows() -> None:
    ds = StandardScaler(["x"]).fit(dataset(ROWS)).transform(dataset({"y": [1]}))
    with pytest.raises(ConfigError, match=r"StandardScaler.transform\(\): there is no column 'x'"):
        ds.schema()


def test_columns_of_own_classes_are_all_read() -> None:
    ds = Doubler().transform(dataset({"x": [1], "y": [2]}))
    assert columns_read(ds, ["x"]) == {"x", "y"}


# ── description ──


def test_columns_are_described() -> None:
    scaler = StandardScaler(["x"], output_columns=["z"])
    assert (scaler.get_input_columns(), scaler.get_output_columns()) == (["x"], ["z"])
    assert repr(scaler) == "StandardScaler(columns=['x'], output_columns=['z'])"
    assert scaler.preferred_batch_format() == "arrow"
    assert Doubler().get_input_columns() == []


def test_blocks_are_transformed_without_pandas() -> None:
    script = """
import sys
import numpy as np
import pyarrow as pa
from spotfit.data.preprocessors import Concatenator, OneHotEncoder, StandardScaler
from spotfit.data.formats.column_arrays import arrow_array
table = pa.Table.from_arrays([arrow_array(np.arange(3.0)), arrow_array(np.arange(3))], ["x", "n"])
scaler, encoder = StandardScaler(["x"]), OneHotEncoder(["n"])
scaler.stats_, encoder.stats_ = {"mean(x)": 1.0, "std(x)": 2.0}, {"unique_values(n)": {1: 0}}
for step in (scaler, encoder, Concatenator(["x", "n"], flatten=True)):
    table = step.transform_block(table)
assert table.num_rows == 3
sys.exit("pandas" in sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert finished.returncode == 0, finished.stderr.decode()


def test_the_example_of_the_guide_runs() -> None:
    guide = (ROOT / "docs/guides/preprocessors.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    assert len(blocks) == 3
    exec("".join(blocks), {})  # noqa: S102 - the example is ours


def test_equal_statistics_are_computed_once() -> None:
    observed = list[pa.Table]()

    class Observed(MomentsStatistic):
        def observe(self, block: pa.Table) -> Any:
            observed.append(block)
            return super().observe(block)

    fold_dataset(
        [Observed("x"), BoundsStatistic("x"), Observed("x")],
        from_arrow(pa.table({"x": [1.0, 2.0]})),
    )

    assert [block["x"].to_pylist() for block in observed] == [[1.0, 2.0]]
