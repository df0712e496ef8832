"""Calls of `Dataset`, to compare their results in Ray Data and in spotfit.data."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeAlias

import numpy as np

Case: TypeAlias = Callable[[], Any]

ROWS = [
    {"k": n % 3, "x": float(n), "s": "abc"[n % 3], "n": None if n == 4 else n} for n in range(10)
]


def result_of(case: Case) -> Any:
    """The result as JSON has it; of an exception, "error"."""
    try:
        return json.loads(json.dumps(plain(case()), default=str))
    except Exception:  # noqa: BLE001 - the types of exceptions differ
        return "error"


def plain(value: Any) -> Any:
    """Replace arrays by their type and values."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": plain(value.tolist())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def cases(data: Any) -> dict[str, Case]:
    """The calls; `data` is `ray.data` or `spotfit.data`."""
    return {
        **transform_cases(data),
        **row_cases(data),
        **split_cases(data),
        **statistic_cases(data),
        **group_cases(data),
        **join_cases(data),
        **output_cases(data),
    }


def transform_cases(data: Any) -> dict[str, Case]:
    expressions = importlib.import_module(f"{data.__name__}.expressions")
    col, lit = expressions.col, expressions.lit

    def rows() -> Any:
        return data.from_items(ROWS)

    return {
        "map": lambda: rows().map(lambda r: {"a": r["x"] + 1, "b": r["s"]}).take(2),
        "map, tensors": lambda: rows().map(lambda r: {"t": np.full((2, 2), r["k"])}).take(2),
        "map, types": lambda: types(
            rows().map(lambda r: {"a": np.float32(r["x"]), "b": np.int8(1), "c": [1], "d": "s"})
        ),
        "map, times": lambda: types(rows().map(lambda _: {"t": datetime(2024, 1, 1, tzinfo=UTC)})),
        "map, lists of different lengths": lambda: (
            rows().map(lambda r: {"l": np.arange(r["k"])}).take(3)
        ),
        "map, structures": lambda: rows().map(lambda _: {"l": {"a": 1, "b": [1, 2]}}).take(1),
        "map, arguments": lambda: (
            rows().map(lambda r, q, z=0: {"x": r["x"] + q + z}, fn_args=(1,), fn_kwargs={"z": 5})
        ).take(1),
        "map_batches": lambda: rows().map_batches(lambda b: {"y": b["x"] * 2}).take(2),
        "map_batches, pandas": lambda: (
            rows().map_batches(lambda f: f.assign(z=f["x"] * 2), batch_format="pandas").take(1)
        ),
        "map_batches, pyarrow": lambda: (
            rows().map_batches(lambda t: t.select(["x"]), batch_format="pyarrow").take(1)
        ),
        "map_batches, sizes": lambda: (
            rows()
            .map_batches(lambda b: {"size": [len(b["x"])] * len(b["x"])}, batch_size=4)
            .take_all()
        ),
        "map_batches, generator": lambda: (
            rows().map_batches(lambda b: ({"x": b["x"][i : i + 5]} for i in (0, 5))).count()
        ),
        "map_batches, None": lambda: rows().map_batches(lambda _: None).take(1),
        "add_column": lambda: rows().add_column("z", lambda f: f["x"] * 2).take(1),
        "add_column, constant": lambda: rows().add_column("z", lambda _: 5).take(1),
        "add_column, numpy": lambda: (
            rows().add_column("z", lambda b: b["x"] + 1, batch_format="numpy").take(1)
        ),
        "with_column": lambda: rows().with_column("z", (col("x") + 1) * 2).take(2),
        "with_column, constant": lambda: rows().with_column("z", lit(3)).take(1),
        "with_column, integers": lambda: (
            rows()
            .with_column("a", col("k") / 2)
            .with_column("b", col("k") % 2)
            .with_column("c", col("k") // 2)
            .take(3)
        ),
        "with_column, text": lambda: (
            rows()
            .with_column("a", col("s").str.upper())
            .with_column("b", col("s").str.contains("a"))
            .take(1)
        ),
        "with_column, is_in": lambda: rows().with_column("b", col("k").is_in([1, 2])).take(3),
        "with_column, nulls": lambda: (
            rows().with_column("a", col("n").is_null()).with_column("b", col("n") > 3).take(5)
        ),
        "rename_columns": lambda: rows().rename_columns({"x": "y"}).columns(),
        "rename_columns, list": lambda: rows().rename_columns(["a", "b", "c", "d"]).columns(),
        "rename_columns, unknown": lambda: rows().rename_columns({"q": "y"}).take(1),
        "select_columns": lambda: rows().select_columns(["s", "x"]).take(1),
        "select_columns, one": lambda: rows().select_columns("s").take(1),
        "select_columns, unknown": lambda: rows().select_columns(["q"]).take(1),
        "drop_columns": lambda: rows().drop_columns(["k", "x"]).columns(),
        "drop_columns, unknown": lambda: rows().drop_columns(["q"]).take(1),
    }


def row_cases(data: Any) -> dict[str, Case]:
    def rows() -> Any:
        return data.from_items(ROWS)

    return {
        "filter, text": lambda: rows().filter(expr="x > 3 and s == 'a'").take_all(),
        "filter, in": lambda: rows().filter(expr="s in ['a', 'b']").count(),
        "filter, nulls": lambda: rows().filter(expr="n > 2").count(),
        "filter, function": lambda: rows().filter(lambda r, t: r["x"] > t, fn_args=(5,)).take_all(),
        "filter, no rows": lambda: rows().filter(expr="x > 100").take_all(),
        "filter, no rows, sum": lambda: rows().filter(expr="x > 100").sum("x"),
        "flat_map": lambda: rows().flat_map(lambda r: [{"x": r["x"]}] * r["k"]).take(4),
        "limit": lambda: rows().limit(3).take_all(),
        "limit, all": lambda: rows().limit(300).count(),
        "union": lambda: rows().union(rows().limit(1)).count(),
        "union, columns": lambda: (
            rows().select_columns(["x"]).union(rows().select_columns(["x", "s"]).limit(1)).columns()
        ),
        "zip": lambda: rows().select_columns(["x"]).zip(rows().select_columns(["x", "s"])).take(1),
        "zip, three": lambda: (
            rows()
            .select_columns(["x"])
            .zip(rows().select_columns(["x"]), rows().select_columns(["x"]))
            .take(1)
        ),
        "zip, shuffled": lambda: (
            sum(
                row["x"] == row["x_1"]
                for row in rows().random_shuffle(seed=1).zip(rows()).take_all()
            )
            < len(ROWS)
        ),
        "zip, different sizes": lambda: rows().zip(rows().limit(3)).take(1),
        "sort": lambda: rows().sort("x", descending=True).take(2),
        "sort, two columns": lambda: rows().sort(["k", "x"], descending=[True, False]).take(4),
        "sort, nulls": lambda: [row["n"] for row in rows().sort("n").take_all()],
        "random_sample, nothing": lambda: rows().random_sample(0.0).count(),
        "random_sample, everything": lambda: rows().random_sample(1.0).count(),
        "random_shuffle": lambda: sorted(row["x"] for row in rows().random_shuffle().take_all()),
        "repartition": lambda: [row["x"] for row in rows().repartition(3).take_all()],
        "range": lambda: data.range(3).take_all(),
    }


def split_cases(data: Any) -> dict[str, Case]:
    def rows() -> Any:
        return data.from_items(ROWS)

    def numbers(parts: Any) -> list[list[float]]:
        return [[row["x"] for row in part.take_all()] for part in parts]

    return {
        "split, equal": lambda: [part.count() for part in rows().split(3, equal=True)],
        "split_at_indices": lambda: numbers(rows().split_at_indices([2, 5])),
        "split_at_indices, beyond": lambda: numbers(rows().split_at_indices([8, 50])),
        "split_at_indices, unsorted": lambda: numbers(rows().split_at_indices([5, 2])),
        "split_proportionately": lambda: numbers(rows().split_proportionately([0.25, 0.5])),
        "split_proportionately, small": lambda: numbers(rows().split_proportionately([0.1, 0.05])),
        "split_proportionately, all": lambda: numbers(rows().split_proportionately([0.5, 0.5])),
        "train_test_split": lambda: numbers(rows().train_test_split(0.25)),
        "train_test_split, count": lambda: numbers(rows().train_test_split(3)),
        "train_test_split, shuffled": lambda: [
            part.count() for part in rows().train_test_split(0.3, shuffle=True, seed=1)
        ],
        "train_test_split, stratified": lambda: [
            sorted(row["k"] for row in part.take_all())
            for part in rows().train_test_split(0.4, stratify="k")
        ],
        "train_test_split, too large": lambda: numbers(rows().train_test_split(50)),
        "train_test_split, invalid": lambda: numbers(rows().train_test_split(1.5)),
    }


def statistic_cases(data: Any) -> dict[str, Case]:
    aggregate = importlib.import_module(f"{data.__name__}.aggregate")

    def rows() -> Any:
        return data.from_items(ROWS)

    return {
        "sum": lambda: rows().sum("n"),
        "sum, all": lambda: rows().select_columns(["k", "x"]).sum(),
        "sum, one column": lambda: rows().select_columns(["x"]).sum(),
        "mean": lambda: rows().mean(["k", "x"]),
        "std": lambda: rows().std("x"),
        "std, nulls": lambda: rows().std("n"),
        "std, ddof": lambda: rows().std("x", ddof=0),
        "max, nulls": lambda: rows().max("n", ignore_nulls=False),
        "min, text": lambda: rows().min("s"),
        "unique": lambda: sorted(rows().unique("s")),
        "unique, nulls": lambda: sorted(map(str, rows().unique("n"))),
        "unique, nulls ignored": lambda: sorted(rows().unique("n", ignore_nulls=True)),
        "aggregate": lambda: rows().aggregate(
            aggregate.Count(), aggregate.Sum("x"), aggregate.Quantile("x")
        ),
        "aggregate, further": lambda: rows().aggregate(
            aggregate.AsList("k"),
            aggregate.CountDistinct("s"),
            aggregate.MissingValuePercentage("n"),
            aggregate.ZeroPercentage("x"),
            aggregate.AbsMax("x"),
        ),
        "aggregate, alias": lambda: rows().aggregate(aggregate.Max("x", alias_name="largest")),
        "count": lambda: rows().count(),
    }


def group_cases(data: Any) -> dict[str, Case]:
    aggregate = importlib.import_module(f"{data.__name__}.aggregate")

    def rows() -> Any:
        return data.from_items(ROWS)

    def sorted_rows(dataset: Any, key: str = "k") -> list[Any]:
        return sorted(dataset.take_all(), key=lambda row: row[key])

    return {
        "groupby, count": lambda: sorted_rows(rows().groupby("k").count()),
        "groupby, mean": lambda: sorted_rows(rows().groupby("k").mean("x")),
        "groupby, std": lambda: sorted_rows(rows().select_columns(["k", "x"]).groupby("k").std()),
        "groupby, nulls": lambda: sorted_rows(rows().groupby("k").max("n", ignore_nulls=False)),
        "groupby, two keys": lambda: sorted_rows(rows().groupby(["k", "s"]).sum("x")),
        "groupby, aggregates": lambda: sorted_rows(
            rows().groupby("k").aggregate(aggregate.Min("x"), aggregate.CountDistinct("s"))
        ),
        "groupby, None": lambda: rows().groupby(None).sum("x").take_all(),
        "map_groups": lambda: sorted_rows(
            rows().groupby("k").map_groups(lambda g: {"m": np.array([g["x"].mean()])}), "m"
        ),
        "map_groups, pandas": lambda: sorted_rows(
            rows().groupby("k").map_groups(lambda f: f.head(1), batch_format="pandas")
        ),
    }


def join_cases(data: Any) -> dict[str, Case]:
    def left() -> Any:
        return data.from_items([{"k": n, "x": float(n)} for n in range(3)])

    def right() -> Any:
        return data.from_items([{"k": 0, "y": 1}, {"k": 1, "y": 2}, {"k": 9, "y": 3}])

    def joined(join_type: str, other: Any, **options: Any) -> list[Any]:
        result = left().join(other, join_type, 2, on=("k",), **options)
        return sorted(result.take_all(), key=repr)

    def join_of(join_type: str) -> Case:
        return lambda: joined(join_type, right())

    kinds = ("inner", "left_outer", "right_outer", "full_outer", "left_semi", "left_anti")
    return {
        **{f"join, {kind}": join_of(kind) for kind in (*kinds, "right_semi", "right_anti")},
        "join, other keys": lambda: joined(
            "inner", data.from_items([{"z": 0, "y": 1}]), right_on=("z",)
        ),
        "join, suffixes": lambda: joined(
            "inner", data.from_items([{"k": 0, "x": 5.0}]), left_suffix="_l", right_suffix="_r"
        ),
        "join, equal names": lambda: joined("inner", data.from_items([{"k": 0, "x": 5.0}])),
        "join, unknown type": lambda: joined("cross", right()),
    }


def output_cases(data: Any) -> dict[str, Case]:
    def rows() -> Any:
        return data.from_items(ROWS)

    return {
        "take_batch": lambda: rows().take_batch(3),
        "take_batch, bytes": lambda: rows().map(lambda _: {"b": b"x"}).take_batch(2)["b"].dtype,
        "take_batch, empty": lambda: rows().limit(0).take_batch(2),
        "take_all, limit": lambda: rows().take_all(limit=3),
        "to_pandas": lambda: rows().select_columns(["k", "x"]).to_pandas().to_dict("list"),
        "to_pandas, limit": lambda: rows().to_pandas(limit=3),
        "iter_rows": lambda: list(rows().limit(2).iter_rows()),
        "iter_batches": lambda: [len(batch["x"]) for batch in rows().iter_batches(batch_size=4)],
        "schema": lambda: repr(rows().schema()),
        "materialize": lambda: rows().map(lambda r: {"x": r["x"]}).materialize().take(2),
        "streaming_split": lambda: sorted(read_together(rows().streaming_split(3))),
        "streaming_split, equal": lambda: len(read_together(rows().streaming_split(3, equal=True))),
    }


def read_together(iterators: list[Any]) -> list[float]:
    """The rows of all iterators, which Ray lets wait for each other."""
    with ThreadPoolExecutor(len(iterators)) as pool:
        parts = pool.map(lambda one: [row["x"] for row in one.iter_rows()], iterators)
        return [number for part in parts for number in part]


def types(dataset: Any) -> list[str]:
    return [str(kind) for kind in dataset.schema().types]
