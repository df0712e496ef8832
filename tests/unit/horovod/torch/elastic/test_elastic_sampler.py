"""ElasticSampler: rows of the ranks, before and after a change of their number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import spotfit.horovod.torch as hvd
from spotfit.horovod.torch.elastic import elastic_sampler
from spotfit.horovod.torch.elastic.elastic_sampler import ElasticSampler

ROWS = range(23)


class Ranks:
    """The number of ranks, and the one whose sampler is created."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def rows(self, count: int, state: dict[str, int] | None = None) -> list[list[int]]:
        """Return the rows of each of `count` ranks, from `state` on."""
        self._monkeypatch.setattr(elastic_sampler, "size", lambda: count)
        rows = []
        for rank in range(count):
            self._monkeypatch.setattr(elastic_sampler, "rank", lambda rank=rank: rank)
            sampler = ElasticSampler(ROWS)
            if state is not None:
                sampler.load_state_dict(state)
            rows.append(list(sampler))
            assert len(sampler) == len(rows[-1])
        return rows


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.fixture
def sampler() -> Iterator[ElasticSampler]:
    hvd.init()
    yield ElasticSampler(ROWS, shuffle=False)
    hvd.shutdown()


def test_ranks_share_the_rows_equally(ranks: Ranks) -> None:
    rows = ranks.rows(4)
    assert [len(own) for own in rows] == [6, 6, 6, 6]
    assert {row for own in rows for row in own} == set(ROWS)


def test_the_same_ranks_continue_with_the_rows_they_would_have_had(ranks: Ranks) -> None:
    whole = ranks.rows(4)
    rest = ranks.rows(4, {"epoch": 0, "processed_num": 2 * 4})
    assert rest == [own[2:] for own in whole], "also the rows that fill the last batch"


def test_other_ranks_share_what_is_left(ranks: Ranks) -> None:
    done = {row for own in ranks.rows(4) for row in own[:2]}
    rest = ranks.rows(3, {"epoch": 0, "processed_num": 2 * 4})
    assert [len(own) for own in rest] == [5, 5, 5]
    assert {row for own in rest for row in own} == set(ROWS) - done


def test_an_epoch_that_is_complete_has_no_rows_left(ranks: Ranks) -> None:
    assert ranks.rows(4, {"epoch": 0, "processed_num": 24}) == [[], [], [], []]


def test_each_epoch_has_another_order(ranks: Ranks) -> None:
    first, second = ranks.rows(1), ranks.rows(1, {"epoch": 1, "processed_num": 0})
    assert first != second
    assert sorted(first[0]) == sorted(second[0])


def test_recorded_batches_are_left_out_after_a_reset(sampler: ElasticSampler) -> None:
    sampler.record_batch(0, 10)
    sampler.record_batch(1, 10)
    assert len(sampler) == 23, "the length is that of the epoch until then"
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 20}
    sampler.reset()
    assert list(sampler) == [20, 21, 22]
    sampler.set_epoch(1)
    assert list(sampler) == list(ROWS)


def test_the_caller_is_called_before_the_first_row(sampler: ElasticSampler) -> None:
    calls: list[str] = []
    sampler.before_first_row = lambda: calls.append("begin")
    assert next(iter(sampler)) == 0
    assert calls == ["begin"]
