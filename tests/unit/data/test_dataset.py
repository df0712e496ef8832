"""`Dataset`: the methods of Ray's class."""

from __future__ import annotations

import inspect
import math
import pickle
import random
from datetime import date
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import Count, Max
from spotfit.data.context import DataContext, RandomSeedConfig
from spotfit.data.dataset import Dataset
from spotfit.data.expressions import col
from spotfit.data.operations.unsupported import REFUSED_METHODS
from spotfit.data.plans.row_plan import ShuffleSettings
from spotfit.data.plans.transforms import RowCountChangedError
from tests.unit.data.row_sources import number_source

METHODS_OF_RAY = (Path(__file__).parent / "ray_dataset_methods.txt").read_text().splitlines()
"""Name and parameters of each public method of `ray.data.Dataset` 2.60.0."""


def numbers(*unit_rows: int) -> Dataset:
    return Dataset.of_source(number_source(*unit_rows))


def ids(dataset: Dataset) -> list[int]:
    return [row["id"] for row in dataset.take_all()]


# --- The names of Ray -----------------------------------------------------------------------------


@pytest.mark.parametrize("line", METHODS_OF_RAY)
def test_every_method_of_ray_is_supported_or_refused_with_a_remedy(line: str) -> None:
    name, *parameters = line.split()
    member = inspect.getattr_static(Dataset, name)
    assert inspect.getdoc(getattr(Dataset, name)), name
    if parameters == ["(property)"]:
        assert isinstance(member, property)
    elif name not in REFUSED_METHODS:
        accepted = inspect.signature(getattr(Dataset, name)).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
        assert takes_all or set(parameters) <= set(accepted)


@pytest.mark.parametrize(
    ("name", "position", "parameter"),
    [
        *(("map", 0, "fn"), ("filter", 1, "expr"), ("limit", 0, "limit"), ("split", 0, "n")),
        *(("sort", 1, "descending"), ("take", 0, "limit"), ("std", 1, "ddof")),
        *(("add_column", 1, "fn"), ("with_column", 1, "expr"), ("repartition", 0, "num_blocks")),
        *(("join", 1, "join_type"), ("train_test_split", 0, "test_size")),
    ],
)
def test_positional_parameters_are_those_of_ray(name: str, position: int, parameter: str) -> None:
    (line,) = (line for line in METHODS_OF_RAY if line.split()[0] == name)
    assert line.split()[1 + position] == parameter
    assert list(inspect.signature(getattr(Dataset, name)).parameters)[1 + position] == parameter


# --- Transforms -----------------------------------------------------------------------------------


def test_a_script_of_ray_reads_as_expected() -> None:
    dataset = (
        spotfit.data.range(10)
        .map(lambda row: {"id": row["id"], "x": row["id"] / 2})
        .map_batches(lambda batch: {**batch, "y": batch["x"] + 1}, batch_size=4)
        .add_column("z", lambda frame: frame["y"] * 2)
        .with_column("w", col("z") - 1)
        .rename_columns({"w": "result"})
        .drop_columns(["x", "y"])
        .select_columns(["id", "result"])
    )
    assert dataset.take(2) == [{"id": 0, "result": 1.0}, {"id": 1, "result": 2.0}]
    assert dataset.columns() == ["id", "result"]


def test_a_dataset_is_not_changed_by_its_methods() -> None:
    dataset = numbers(5)
    dataset.map(lambda row: {}).limit(2).random_shuffle()
    assert ids(dataset) == [0, 1, 2, 3, 4]


def test_all_columns_may_be_renamed() -> None:
    assert numbers(2).rename_columns(["a", "b", "c"]).columns() == ["a", "b", "c"]


def test_with_columns_takes_several_dictionaries() -> None:
    dataset = numbers(2).with_columns({"a": col("id") + 1}, {"b": col("id") + 2})
    assert dataset.take(1) == [{"id": 0, "square": 0, "group": 0, "a": 1, "b": 2}]


@pytest.mark.parametrize(
    "call",
    [
        lambda dataset: dataset.select_columns(["id", "id"]),
        lambda dataset: dataset.drop_columns(["id", "id"]),
        lambda dataset: dataset.rename_columns({"id": "x", "group": "x"}),
        lambda dataset: dataset.limit(-1),
        lambda dataset: dataset.map_batches(len, num_gpus=1),
        lambda dataset: dataset.with_column("x", 5),
    ],
)
def test_invalid_arguments_are_refused_at_once(call: Any) -> None:
    with pytest.raises(ConfigError):
        call(numbers(3))


def test_a_batch_function_that_changes_the_number_of_rows_is_reported() -> None:
    dataset = numbers(5).map_batches(lambda batch: {"id": batch["id"][:2]})
    with pytest.raises(RowCountChangedError, match="returned 2 rows for 5"):
        dataset.take_all()


def test_columns_are_pushed_down_to_the_source() -> None:
    assert numbers(5).select_columns("square").columns_to_read() == ["square"]
    assert numbers(5).drop_columns("square").columns_to_read() == ["id", "group"]
    assert numbers(5).map(lambda row: row).select_columns("id").columns_to_read() is None


# --- Rows -----------------------------------------------------------------------------------------


def test_a_filter_may_be_text_expression_or_function() -> None:
    dataset = numbers(4, 6)
    for filtered in (
        dataset.filter(expr="id > 6"),
        dataset.filter(expr=col("id") > 6),
        dataset.filter(lambda row: row["id"] > 6),
    ):
        assert ids(filtered) == [7, 8, 9]
        assert filtered.count() == 3


def test_a_class_may_filter() -> None:
    class Above:
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def __call__(self, row: dict[str, Any]) -> bool:
            return bool(row["id"] > self.limit)

    assert ids(numbers(5).filter(Above, fn_constructor_args=[2])) == [3, 4]


def test_flat_map_multiplies_rows() -> None:
    assert ids(numbers(3).flat_map(lambda row: [row] * row["id"])) == [1, 2, 2]


def test_a_limit_is_the_first_rows() -> None:
    assert ids(numbers(4, 4).limit(6)) == list(range(6))
    assert numbers(4).limit(100).count() == 4
    assert numbers(4).limit(0).take_all() == []


def test_a_union_has_the_rows_of_all() -> None:
    assert ids(numbers(2).union(numbers(3), numbers(1))) == [0, 1, 0, 1, 2, 0]


def test_a_union_with_shuffled_rows_is_shuffled() -> None:
    union = numbers(2).union(numbers(3).random_shuffle(seed=4), numbers(1))
    assert union.shuffle_settings == numbers(3).random_shuffle(seed=4).shuffle_settings
    assert sorted(ids(union)) == [0, 0, 0, 1, 1, 2]


def test_columns_are_zipped() -> None:
    other = numbers(3).select_columns("square").rename_columns({"square": "other"})
    assert numbers(3).zip(other).take(3)[2] == {"id": 2, "square": 4, "group": 2, "other": 4}


def test_rows_are_sorted_and_joined() -> None:
    assert ids(numbers(3, 2).sort("id", descending=True)) == [4, 3, 2, 1, 0]
    assert numbers(2).join(numbers(3), "inner", 1, left_suffix="_l").columns() == [
        *("id", "square_l", "group_l", "square", "group")
    ]


def test_a_sample_has_about_the_fraction() -> None:
    sample = numbers(*[100] * 10).random_sample(0.3, seed=5)
    assert 200 < sample.count() < 400
    assert ids(sample) == sorted(ids(sample))


# --- Order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["random_shuffle", "randomize_block_order"])
def test_a_shuffled_dataset_has_every_row_once(call: str) -> None:
    dataset = getattr(numbers(*[5] * 8), call)(seed=2)
    assert sorted(ids(dataset)) == list(range(40))
    assert ids(dataset) == ids(dataset)
    assert ids(dataset) != list(range(40))


def test_a_seed_may_be_a_configuration() -> None:
    seed = RandomSeedConfig(5)
    assert numbers(3).random_shuffle(seed=seed).shuffle_settings.seed == 5
    samples = [numbers(100).random_sample(0.5, seed=value) for value in (5, seed)]
    assert ids(samples[0]) == ids(samples[1])


def test_what_is_computed_from_shuffled_rows_does_not_depend_on_their_order() -> None:
    dataset = numbers(5, 5).random_shuffle(seed=1)
    assert dataset.sum("id") == 45
    assert sorted(ids(dataset.filter(expr="id > 7"))) == [8, 9]


def test_a_limit_of_shuffled_rows_is_a_sample() -> None:
    sample = ids(numbers(*[10] * 10).random_shuffle(seed=1).limit(20))
    assert len(sample) == len(set(sample)) == 20
    assert max(sample) > 50


def test_rows_stay_shuffled_when_they_are_materialized() -> None:
    dataset = numbers(20).random_shuffle(seed=1)
    materialized = dataset.materialize()
    assert ids(materialized) == ids(dataset)
    assert materialized.shuffle_settings.kind == "none"


def test_repartition_keeps_the_rows() -> None:
    assert ids(numbers(3, 3).repartition(10)) == list(range(6))
    assert numbers(3).repartition(2, shuffle=True).shuffle_settings.kind == "rows"


# --- After a shuffle ------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["zip", "mix"])
@pytest.mark.parametrize(
    "count",
    [
        lambda rows: rows.filter(expr="id > 3").count(),
        lambda rows: rows.sort("id").count(),
        lambda rows: rows.groupby("id").count().count(),
        lambda rows: len(rows.flat_map(lambda row: [row, row]).take_all()),
    ],
    ids=["filter", "sort", "group", "flat_map"],
)
def test_operations_on_combined_datasets_end(combine: str, count: Any) -> None:
    """Their threads list parts of the datasets while another listing is computed."""
    rows = numbers(10, 10, 10)
    zipped = rows.zip(rows.rename_columns({"id": "other"}))
    assert count(zipped if combine == "zip" else rows.mix(rows)) > 20


def test_shuffled_rows_are_zipped_in_a_random_order() -> None:
    rows = numbers(60, 40).random_shuffle(seed=1).zip(spotfit.data.range(100))
    pairs = [(row["id"], row["id_1"]) for row in rows.take_all()]
    assert [number for _, number in pairs] == list(range(100))
    assert sorted(number for number, _ in pairs) == list(range(100))
    assert sum(number == other for number, other in pairs) < 20


def test_shuffled_rows_of_another_dataset_are_zipped_in_a_random_order() -> None:
    rows = spotfit.data.range(100).zip(numbers(60, 40).random_shuffle(seed=1))
    others = [row["id_1"] for row in rows.take_all()]
    assert others != sorted(others) == list(range(100))


def test_datasets_that_are_shuffled_by_one_seed_are_zipped_row_by_row() -> None:
    pairs = (
        numbers(60, 40).random_shuffle(seed=1).zip(spotfit.data.range(100).random_shuffle(seed=1))
    )
    assert all(row["id"] == row["id_1"] for row in pairs.take_all())


def test_shuffled_units_are_zipped_in_their_order() -> None:
    rows = numbers(*[10] * 8).randomize_block_order(seed=1).zip(spotfit.data.range(80))
    firsts = [row["id"] for row in rows.take_all()][::10]
    assert firsts != sorted(firsts) == list(range(0, 80, 10))


def test_a_zip_is_the_same_in_every_epoch() -> None:
    iterator = numbers(60, 40).random_shuffle(seed=1).zip(spotfit.data.range(100)).iterator()
    epochs = [[row["id"] for row in iterator.iter_rows()] for _ in range(2)]
    assert epochs[0] == epochs[1]


def test_a_mix_is_shuffled_if_one_of_its_datasets_is() -> None:
    mixed = numbers(60, 40).mix(spotfit.data.range(100).random_shuffle(seed=1))
    assert mixed.shuffle_settings == ShuffleSettings("rows", 1)


def test_groups_of_shuffled_rows_are_random_samples() -> None:
    rows = spotfit.data.from_items([{"label": n // 50, "id": n} for n in range(100)])
    firsts = (
        rows.random_shuffle(seed=1)
        .groupby("label")
        .map_groups(lambda group: {name: values[:10] for name, values in group.items()})
    )
    found = [row["id"] for row in firsts.take_all()]
    assert sum(number < 50 for number in found) == 10
    assert set(found) != {*range(10), *range(50, 60)}


# --- Parts ----------------------------------------------------------------------------------------


def test_splits_have_the_rows_of_ray() -> None:
    dataset = numbers(6, 4)
    assert [ids(part) for part in dataset.split_at_indices([3, 8])] == [
        *([0, 1, 2], [3, 4, 5, 6, 7], [8, 9])
    ]
    assert [part.count() for part in dataset.split(3)] == [3, 3, 4]
    assert [part.count() for part in dataset.split(3, equal=True)] == [3, 3, 3]
    assert [part.count() for part in dataset.split_proportionately([0.2, 0.5])] == [2, 5, 3]


def test_the_parts_of_a_split_are_iterated() -> None:
    first, second = numbers(3, 3).split(2)
    assert [row["id"] for row in first.iterator().iter_rows()] == [0, 1, 2]
    assert [row["id"] for row in second.iter_rows()] == [3, 4, 5]
    parts = numbers(3, 3).streaming_split(2, equal=True)
    assert [[row["id"] for row in part.iter_rows()] for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_a_streaming_split_leaves_out_no_row_unless_parts_are_equal() -> None:
    def counts(*, equal: bool) -> list[int]:
        parts = numbers(6, 4).streaming_split(3, equal=equal)
        return [len(list(part.iter_rows())) for part in parts]

    assert counts(equal=False) == [3, 3, 4]
    assert counts(equal=True) == [3, 3, 3]


def test_the_rows_of_a_streaming_split_are_all_rows() -> None:
    parts = numbers(6, 5).random_shuffle(seed=1).streaming_split(4)
    rows = [number for part in parts for batch in part.iter_batches() for number in batch["id"]]
    assert sorted(rows) == list(range(11))


def test_a_streaming_split_into_no_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="n must be a positive integer"):
        numbers(3).streaming_split(0)


def test_the_test_part_is_last_unless_rows_are_shuffled() -> None:
    train, test = numbers(10).train_test_split(0.3)
    assert (ids(train), ids(test)) == (list(range(7)), [7, 8, 9])
    train, test = numbers(*[10] * 10).train_test_split(20, shuffle=True, seed=1)
    assert sorted(ids(train) + ids(test)) == list(range(100))
    assert ids(test) != list(range(80, 100))
    assert ids(train) != sorted(ids(train))
    assert ids(test) != sorted(ids(test))


def test_the_test_part_of_a_shuffled_dataset_is_a_sample() -> None:
    sorted_by_class = spotfit.data.from_items([{"id": n, "label": n // 50} for n in range(100)])
    train, test = sorted_by_class.random_shuffle(seed=3).train_test_split(0.2)
    assert test.count() == 20
    assert {row["label"] for row in test.take_all()} == {0, 1}
    assert train.shuffle_settings.kind == "rows"


def test_a_split_may_be_stratified() -> None:
    _, test = numbers(*[10] * 6).train_test_split(0.5, stratify="group")
    assert [row["count()"] for row in test.groupby("group").count().take_all()] == [10, 10, 10]
    with pytest.raises(ConfigError, match="stratify"):
        numbers(10).train_test_split(0.5, stratify="group", shuffle=True)


def test_a_streaming_split_is_decided_row_by_row() -> None:
    train, test = numbers(*[50] * 4).streaming_train_test_split(0.4, seed=3)
    assert sorted(ids(train) + ids(test)) == list(range(200))
    with pytest.raises(ConfigError, match="hash_column"):
        numbers(10).streaming_train_test_split(0.4, split_type="hash")


# --- Looking --------------------------------------------------------------------------------------


def test_statistics_are_those_of_pandas() -> None:
    frame = pd.DataFrame({"x": [3.0, 1.0, 4.0, 1.0, 5.0], "y": [2, 7, 1, 8, 2]})
    dataset = spotfit.data.from_items(frame.to_dict("records"))
    assert dataset.sum("x") == 14.0
    assert dataset.min(["x", "y"]) == {"min(x)": 1.0, "min(y)": 1}
    assert dataset.max() == {"max(x)": 5.0, "max(y)": 8}
    assert dataset.mean("y") == frame["y"].mean()
    assert dataset.std("x") == pytest.approx(frame["x"].std())
    assert dataset.unique("x") == [3.0, 1.0, 4.0, 5.0]
    assert dataset.aggregate(Max("x"), Count()) == {"max(x)": 5.0, "count()": 5}


def test_rows_are_taken_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = numbers(3, 3).select_columns("id")
    assert dataset.take(4) == [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]
    dataset.show(2)
    assert capsys.readouterr().out == "{'id': 0}\n{'id': 1}\n"


def test_more_rows_than_the_limit_are_an_error() -> None:
    for call in (numbers(5).take_all, numbers(5).to_pandas):
        assert len(call(limit=5)) == 5
        with pytest.raises(ConfigError, match="5 rows"):
            call(limit=4)


def test_a_batch_is_taken_in_any_format() -> None:
    batch = numbers(3, 3).take_batch(4)
    assert batch["id"].tolist() == [0, 1, 2, 3]
    assert list(numbers(2).take_batch(batch_format="pandas")["id"]) == [0, 1]
    with pytest.raises(ConfigError, match="empty"):
        numbers(0).take_batch()


def test_counting_reads_no_rows() -> None:
    source = number_source(4, 5)
    dataset = Dataset.of_source(source).map(lambda row: row)
    assert dataset.count() == 9
    assert dataset.num_blocks() == 2
    assert dataset.size_bytes() == 900
    assert source.reads == []


def test_a_dataset_describes_itself(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = numbers(4).map(math.sqrt)
    dataset.set_name("roots")
    assert dataset.name == "roots"
    assert "rows: 4 in 1 units" in dataset.stats()
    dataset.explain()
    assert capsys.readouterr().out == f"{dataset.stats()}\n"
    assert repr(dataset) == "Dataset(name=roots, transforms=[map(sqrt)], shuffle=none)"


def test_the_context_is_that_of_the_process() -> None:
    assert numbers(1).context is DataContext.get_current()


def test_length_and_iteration_are_errors_that_name_the_method() -> None:
    with pytest.raises(AttributeError, match="count"):
        len(numbers(3))
    with pytest.raises(TypeError, match="iter_rows"):
        iter(numbers(3))


def test_a_copy_has_its_own_name() -> None:
    dataset = numbers(3)
    copy = Dataset.copy(dataset)
    copy.set_name("copy")
    assert dataset.name is None
    assert ids(copy) == ids(dataset)


# --- Out ------------------------------------------------------------------------------------------


def test_batches_and_rows_are_iterated_in_epochs() -> None:
    dataset = numbers(*[5] * 4).random_shuffle(seed=3)
    batches = dataset.iter_batches(batch_size=8)
    passes = [np.concatenate([batch["id"] for batch in batches]).tolist() for _ in range(2)]
    assert [sorted(rows) for rows in passes] == [list(range(20))] * 2
    assert passes[0] != passes[1]
    assert [len(batch["id"]) for batch in batches] == [8, 8, 4]


def test_a_loop_that_iterates_again_gets_another_order() -> None:
    dataset = numbers(*[5] * 4).random_shuffle(seed=3)
    passes = [[row["id"] for row in dataset.iter_rows()] for _ in range(3)]
    assert [sorted(rows) for rows in passes] == [list(range(20))] * 3
    assert len({tuple(rows) for rows in passes}) == 3
    copy = pickle.loads(cloudpickle.dumps(dataset))
    assert [row["id"] for row in copy.iter_rows()] == passes[0]


def test_tensors_are_iterated() -> None:
    (batch,) = numbers(3).select_columns("id").iter_torch_batches(batch_size=10)
    assert torch.equal(batch["id"], torch.tensor([0, 1, 2]))


def test_a_random_transform_is_computed_once_by_materialize() -> None:
    rng = random.Random(5)
    dataset = numbers(5).map(lambda row: {"id": row["id"], "draw": rng.random()}).materialize()
    assert dataset.take_all() == dataset.take_all()
    assert dataset.transforms == ()


def test_an_empty_dataset_is_materialized_with_its_columns() -> None:
    assert numbers(5).limit(0).materialize().columns() == ["id", "square", "group"]


def test_materialized_files_are_found_again(tmp_path: Path) -> None:
    log = tmp_path / "calls"

    def log_call(batch: dict[str, Any]) -> dict[str, Any]:
        with log.open("a") as file:
            file.write("x")
        return batch

    dataset = numbers(3, 3).map_batches(log_call)
    assert ids(dataset.materialize(tmp_path / "rows")) == list(range(6))
    after_first = log.read_text()
    assert ids(dataset.materialize(str(tmp_path / "rows"))) == list(range(6))
    assert log.read_text() == after_first
    assert ids(dataset.limit(2).materialize(tmp_path / "rows")) == [0, 1]


def test_rows_are_computed_again_when_a_captured_value_has_changed(tmp_path: Path) -> None:
    weights = np.array([2])
    dataset = numbers(3).map_batches(lambda batch: {"id": batch["id"] * weights[0]})
    assert ids(dataset.materialize(tmp_path)) == [0, 2, 4]
    weights[0] = 3
    assert ids(dataset.materialize(tmp_path)) == [0, 3, 6]


def test_rows_are_computed_again_when_the_function_of_a_part_has_changed(tmp_path: Path) -> None:
    for factor in (2, 3):
        weights = np.array([factor])
        part = numbers(2).flat_map(lambda row: [{"id": row["id"] * weights[0]}])  # noqa: B023
        mapped = part.map(lambda row: {"id": row["id"] + weights[0]})  # noqa: B023
        rows = numbers(1).select_columns(["id"]).union(part, mapped)
        assert ids(rows.materialize(tmp_path)) == [0, 0, factor, factor, 2 * factor]


def test_rows_are_computed_again_when_a_captured_value_cannot_be_compared(tmp_path: Path) -> None:
    calls = iter(range(100))  # a generator cannot be pickled
    source = (next(calls) for _ in range(100))
    dataset = numbers(1).map(lambda row: {"id": next(source)})
    first = ids(dataset.materialize(tmp_path))
    assert ids(dataset.materialize(tmp_path)) > first


def test_files_of_every_format_are_written(tmp_path: Path) -> None:
    dataset = numbers(3).select_columns(["id"])
    dataset.write_parquet(tmp_path / "parquet")
    dataset.write_csv(str(tmp_path / "csv"))
    dataset.write_json(tmp_path / "json")
    dataset.write_orc(tmp_path / "orc")
    dataset.write_numpy(tmp_path / "npy", column="id")
    written = {path.parent.name: path for path in tmp_path.rglob("*.*")}
    assert pq.read_table(written["parquet"])["id"].to_pylist() == [0, 1, 2]
    assert written["csv"].read_text() == '"id"\n0\n1\n2\n'
    assert written["json"].read_text() == '{"id": 0}\n{"id": 1}\n{"id": 2}\n'
    assert np.load(written["npy"]).tolist() == [0, 1, 2]
    assert written["orc"].suffix == ".orc"


def test_written_files_are_read_again(tmp_path: Path) -> None:
    numbers(3, 4).filter(expr="id != 2").write_parquet(tmp_path)
    assert ids(spotfit.data.read_parquet(str(tmp_path))) == [0, 1, 3, 4, 5, 6]
    (path,) = tmp_path.iterdir()
    assert spotfit.data.read_parquet(str(tmp_path)).input_files() == [str(path)]


def test_pandas_gets_all_rows() -> None:
    frame = numbers(2, 2).to_pandas()
    assert frame["square"].tolist() == [0, 1, 4, 9]


def test_a_pickle_is_small_and_reads_the_same_rows() -> None:
    dataset = spotfit.data.range(10**6).map_batches(lambda batch: {"x": batch["id"] + 1})
    body = cloudpickle.dumps(dataset.random_shuffle(seed=1).train_test_split(0.25)[1])
    assert len(body) < 8000
    part = pickle.loads(body)
    assert part.count() == 250_000
    assert part.shuffle_settings.seed == 1


def test_names_of_older_versions_are_the_same_dataset() -> None:
    dataset = numbers(4)
    assert dataset.lazy() is dataset
    assert ids(dataset.fully_executed()) == [0, 1, 2, 3]
    assert not dataset.is_fully_executed()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("name > 1", r"filter\(expr='name > 1'\) cannot be evaluated: .*'name' is string"),
        ("id == 'a'", "'id' is int64"),
        ("id in ['a']", "'id' is int64"),
        ("id == 18446744073709551615", "'id' is int64"),
        ("id < 99999999999999999999", "does not fit into 64 bits"),
        ("day > 'x'", "'day' is date32"),
        (pc.field("name") > 1, "'name' is string"),
        (col("id") / 0 > 1, "divide by zero"),
    ],
)
def test_an_expression_that_does_not_fit_the_columns_is_reported(
    expression: Any, message: str
) -> None:
    table = pa.table({"id": [1], "name": ["a"], "day": [date(2020, 1, 1)]})
    with pytest.raises(ConfigError, match=message):
        spotfit.data.from_arrow(table).filter(expr=expression).count()


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows.select_columns(["id"]).take(1),
        lambda rows: rows.with_column("x", col("id") + 1).take(1),
        lambda rows: rows.filter(expr="id > 1").count(),
        lambda rows: rows.sum("id"),
    ],
)
def test_a_column_that_a_function_does_not_return_is_reported(read: Any) -> None:
    rows = numbers(2).map(lambda row: {"idx": row["id"]})
    with pytest.raises(ConfigError, match=r"no column 'id'(.|\n)*Did you mean 'idx'"):
        read(rows)
