from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader, call_seeded
from spotfit.data.order import EpochOrder, OrderSettings
from tests.unit.data.feeding.augmented_rows import NAME, Pass, RaiseAt, dataset_of
from tests.unit.data.order_rows import rows_at


def test_the_slices_of_an_epoch_contain_every_row_once() -> None:
    one_pass = Pass(dataset_of(50))
    ids = [row for table in one_pass.expected for row in table.column("id").to_pylist()]
    assert sorted(ids) == list(range(50))


def test_a_slice_contains_the_rows_of_its_places_in_the_order() -> None:
    dataset = dataset_of(50)
    one_pass = Pass(dataset)
    order = EpochOrder(dataset.manifest.unit_rows, one_pass.settings, 0)
    for task, table in zip(one_pass.tasks(), one_pass.expected, strict=True):
        first = task.number * one_pass.slice_rows
        places = [row * one_pass.lanes + task.lane for row in range(first, first + table.num_rows)]
        read = [
            dataset.manifest.read_part(unit, row, 1).column("id")[0].as_py()
            for unit, row in rows_at(order, places)
        ]
        assert table.column("id").to_pylist() == read


def test_a_slice_has_equal_bytes_whatever_was_read_before(rng: random.Random) -> None:
    one_pass = Pass(dataset_of(90), seed=rng.randrange(2**32))
    pairs = list(zip(one_pass.tasks(), one_pass.expected, strict=True))
    rng.shuffle(pairs)
    reader = SliceReader({NAME: one_pass.dataset}, cache_bytes=0)
    for task, expected in pairs:
        reader.prefetch(pairs[rng.randrange(len(pairs))][0])
        assert reader.read(task).equals(expected)


def test_epochs_differ_in_their_random_numbers() -> None:
    dataset = dataset_of(12)
    noise = [Pass(dataset, epoch=epoch).expected[0].column("noise") for epoch in (0, 1)]
    assert noise[0] != noise[1]


def test_the_global_generators_are_restored() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    call_seeded(
        lambda block: block.append_column("r", pa.array([random.random()])),
        pa.table({"id": [0]}),
        7,
    )
    assert (random.random(), np.random.random()) == expected


def test_a_failed_read_is_repeated() -> None:
    dataset = dataset_of(8, RaiseAt(-1))
    reader = SliceReader({NAME: dataset})
    task = next(Pass(dataset).tasks())
    source = dataset.manifest.sources[0]
    read_unit, calls = type(source).read_unit, []

    def fail_once(self: object, *args: object) -> pa.Table:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("unavailable")
        return read_unit(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "read_unit", fail_once)
        with pytest.raises(OSError, match="unavailable"):
            reader.read(task)
        assert reader.read(task).num_rows == 3


def test_an_unknown_dataset_raises_key_error() -> None:
    task = SliceTask(dataset="other", epoch=0, order=OrderSettings(), lane=0, number=0)
    with pytest.raises(KeyError, match="other"):
        SliceReader({NAME: dataset_of(1)}).read(task)


_IMPORTS_TORCH = """
import pyarrow as pa
from spotfit.data.loading.slices import call_seeded
from tests.unit.data.order_rows import rows_at

def draw(block):
    import torch
    return block.append_column("r", pa.array(torch.rand(len(block)).tolist()))

block = pa.table({"id": [0, 1]})
first, second = (call_seeded(draw, block, 7) for _ in range(2))
assert first.equals(second), (first, second)
"""


def test_a_function_that_imports_torch_draws_equal_numbers_in_its_first_call() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS_TORCH], check=True)
