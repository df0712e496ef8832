"""Aggregates of groups, against pandas and against the aggregates of each group alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import (
    AggregateFnV2,
    AsList,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Quantile,
    Std,
    Sum,
)
from spotfit.data.operations.group_aggregates import aggregate_groups, sort_groups
from tests.unit.data.fold_blocks import fold

_RNG = np.random.default_rng(9)
_COUNT = 2000
TABLE = pa.table(
    {
        "k": pa.array([None if n % 11 == 0 else int(n) % 7 for n in range(_COUNT)]),
        "j": pa.array(_RNG.choice(["a", "b", "c"], _COUNT)),
        "x": pa.array(
            [None if n % 5 == 0 else 1e6 + v for n, v in enumerate(_RNG.normal(size=_COUNT))]
        ),
        "n": pa.array(_RNG.integers(-9, 9, _COUNT)),
        "sparse": pa.array([float(n) if n % 7 == 3 else None for n in range(_COUNT)]),
        "s": pa.array(_RNG.choice(["u", "v"], _COUNT)),
    }
)
BLOCKS = [TABLE.slice(first, size) for first, size in ((0, 3), (3, 900), (903, 0), (903, 1097))]


class UserSum(AggregateFnV2):
    """A sum that is computed for each group alone."""

    def __init__(self, on: str) -> None:
        super().__init__(f"user_sum({on})", on=on)

    def aggregate_block(self, block: pa.Table) -> Any:
        values = block[self.on].drop_null().to_pylist()
        return sum(values) if values else None

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        return current_accumulator + new


def rows_of(keys: list[str], *aggregates: Any) -> list[dict[str, Any]]:
    table = aggregate_groups(BLOCKS, keys, aggregates)
    assert table is not None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.mark.parametrize("keys", [["k"], ["j", "k"]])
@pytest.mark.parametrize("ignore_nulls", [True, False])
@pytest.mark.parametrize("column", ["x", "n", "sparse"])
@pytest.mark.parametrize("kind", [Sum, Min, Max, Mean, Std, Count])
def test_arrow_gives_the_aggregate_of_each_group_alone(
    kind: Any, column: str, ignore_nulls: bool, keys: list[str]
) -> None:
    aggregate = kind(column, ignore_nulls=ignore_nulls)
    rows = rows_of(keys, aggregate)
    groups = list(sort_groups(TABLE, keys).tables())
    assert len(rows) == len(groups)
    for row, group in zip(rows, groups, strict=True):
        assert [row[key] for key in keys] == [group[key][0].as_py() for key in keys]
        expected = fold(kind(column, ignore_nulls=ignore_nulls), [group])
        if expected is None:
            assert row[aggregate.name] is None
        else:
            assert row[aggregate.name] == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_the_aggregates_are_those_of_pandas() -> None:
    grouped = TABLE.to_pandas().groupby("j")["x"]
    rows = rows_of(["j"], Sum("x"), Mean("x"), Std("x"), Min("x"), Count())
    for name in ("sum", "mean", "std", "min"):
        values = [row[f"{name}(x)"] for row in rows]
        assert values == pytest.approx(getattr(grouped, name)().tolist(), rel=1e-9)
    assert [row["count()"] for row in rows] == grouped.size().tolist()


def test_types_of_minima_are_those_of_the_columns() -> None:
    rows = rows_of(["j"], Min("s"), Max("n"))
    assert {row["min(s)"] for row in rows} <= {"u", "v"}
    assert all(isinstance(row["max(n)"], int) for row in rows)


def test_aggregates_of_the_user_are_merged_over_blocks() -> None:
    rows = rows_of(["k"], UserSum("n"), Sum("n"))
    assert [row["user_sum(n)"] for row in rows] == [row["sum(n)"] for row in rows]
    assert rows[-1]["k"] is None


def test_aggregates_that_arrow_lacks() -> None:
    rows = rows_of(["j"], CountDistinct("s"), Quantile("n", q=0.5), AsList("n"))
    frame = TABLE.to_pandas().groupby("j")["n"]
    assert [row["count_distinct(s)"] for row in rows] == [2, 2, 2]
    assert [row["quantile(n)"] for row in rows] == frame.median().tolist()
    assert [row["list(n)"] for row in rows] == frame.agg(list).tolist()


def test_no_key_is_one_group() -> None:
    assert rows_of([], Sum("n"), Count()) == [
        {"sum(n)": sum(TABLE["n"].to_pylist()), "count()": _COUNT}
    ]


def test_no_rows_are_no_groups() -> None:
    assert aggregate_groups([], ["k"], [Sum("n")]) is None
    assert aggregate_groups([], ["k"], [UserSum("n")]) is None


def test_many_groups_are_merged_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_of(["n"], Std("x"), Count(), Mean("x"))
    monkeypatch.setattr("spotfit.data.operations.group_aggregates._MAX_PARTIAL_ROWS", 1)
    assert rows_of(["n"], Std("x"), Count(), Mean("x")) == [
        pytest.approx(row, rel=1e-9) for row in expected
    ]


def test_an_aggregate_may_be_of_a_key() -> None:
    rows = rows_of(["n"], Count("n"), Max("n"))
    assert all(row["max(n)"] == row["n"] for row in rows)


def test_the_sum_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sum\(s\)"):
        rows_of(["k"], Sum("s"))


def test_groups_keep_the_order_of_their_rows() -> None:
    table = pa.table({"a": [1, 0, 1, 0], "b": ["y", "x", None, "x"], "n": [0, 1, 2, 3]})
    groups = [group["n"].to_pylist() for group in sort_groups(table, ["a", "b"]).tables()]
    assert groups == [[1, 3], [0], [2]]


def test_many_groups_have_their_own_values() -> None:
    keys = np.arange(200_000) % 50_000
    blocks = [pa.table({"k": part, "x": part * 2.0}) for part in np.array_split(keys, 4)]
    table = aggregate_groups(blocks, ["k"], [Sum("x"), Mean("x")])
    frame = pd.DataFrame({"k": keys, "x": keys * 2.0}).groupby("k")["x"]
    assert table is not None
    assert np.array_equal(table["sum(x)"].to_numpy(), frame.sum().to_numpy())
    assert np.array_equal(table["mean(x)"].to_numpy(), frame.mean().to_numpy())


def test_sums_of_groups_do_not_wrap_around() -> None:
    blocks = [
        pa.table({"k": [0, 1, 1], "v": [2**62, 2**63 - 1, -(2**63)]}),
        pa.table({"k": [0, 1], "v": [2**62 - 1, 5]}),
    ]
    table = aggregate_groups(blocks, ["k"], [Sum("v"), Mean("v")])
    assert table is not None
    assert table.schema.field("sum(v)").type == pa.int64()
    assert table["sum(v)"].to_pylist() == [2**63 - 1, 4]
    assert table["mean(v)"].to_pylist() == [2.0**62, pytest.approx(4 / 3)]


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint64", "bool"])
def test_sums_of_groups_have_the_sign_of_the_column(kind: str) -> None:
    values = pa.array([1, 1, 0]).cast(kind)
    table = aggregate_groups([pa.table({"k": [0, 0, 1], "v": values})], ["k"], [Sum("v")])
    assert table is not None
    assert table.schema.field("sum(v)").type == (pa.int64() if kind == "int8" else pa.uint64())
    assert table["sum(v)"].to_pylist() == [2, 0]


def test_a_sum_of_a_group_beyond_64_bits_is_refused() -> None:
    blocks = [pa.table({"k": [0], "v": [2**63 - 1]})] * 2
    with pytest.raises(ConfigError, match=r"sum\(v\) does not fit into int64"):
        aggregate_groups(blocks, ["k"], [Sum("v")])
