"""Answers of price APIs in the user's cache: their age, failures, and damaged files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from spotfit.core.errors import ProvisionPermissionError
from spotfit_provisioners.prices.cache import (
    RETRY_INTERVAL_S,
    CachedRows,
    PositivePrice,
    PriceCache,
    note_problem,
)


class Row(msgspec.Struct, frozen=True):
    usd: PositivePrice


@dataclass
class Api:
    """Answers with a higher price at each request, or raises `error`."""

    now_s: float = 1e9
    error: Exception | None = None
    requests: int = 0
    cache: PriceCache = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.cache = PriceCache(lambda: self.now_s)

    def fetch(self) -> list[Row]:
        self.requests += 1
        if self.error is not None:
            raise self.error
        return [Row(float(self.requests))]

    def read(self, **query: str) -> CachedRows[Row]:
        return self.cache.read(
            {"region": "here", **query},
            Row,
            self.fetch,
            max_age_s=3600.0,
            errors=(ZeroDivisionError,),
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spotfit/prices"


@pytest.fixture
def api(folder: Path) -> Api:
    return Api()


def test_api_is_requested_once_an_hour_for_each_query(api: Api) -> None:
    first = api.read()
    api.now_s += 3599
    api.restart()
    assert api.read() == first, "another process reads the file"
    assert api.requests == 1
    assert api.read(region="there").rows == (Row(2.0),)
    api.now_s += 2
    assert api.read() == CachedRows((Row(3.0),), api.now_s)


@pytest.mark.parametrize(
    "error",
    [
        ProvisionPermissionError("not permitted", do="Grant it."),
        OSError("no route"),
        ZeroDivisionError("of the client library"),
        KeyError("priceDimensions"),
    ],
)
def test_failed_request_returns_the_last_answer_with_its_age(api: Api, error: Exception) -> None:
    first_s = api.now_s
    api.read()
    api.error = error
    api.now_s += 3 * 3600
    answer = api.read()
    assert (answer.rows, answer.as_of_s) == ((Row(1.0),), first_s)
    assert answer.problem.endswith("The prices are 3.0 h old.")


def test_failed_request_without_an_earlier_answer_has_a_reason(api: Api) -> None:
    api.error = ProvisionPermissionError("not permitted.", do="Grant it.")
    assert api.read() == CachedRows(problem="not permitted. Grant it.")


def test_failed_request_is_repeated_after_an_interval(api: Api) -> None:
    api.error = OSError("no route")
    assert api.read().problem == api.read().problem == "no route"
    assert api.requests == 1
    api.now_s += RETRY_INTERVAL_S
    api.error = None
    assert api.read().rows == (Row(2.0),)


def test_error_in_our_own_code_is_raised(api: Api) -> None:
    api.error = AssertionError("a defect")
    with pytest.raises(AssertionError):
        api.read()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 5000,
        b'{"format":1,"query":{"region":"here"},"fetched_at_s":1e9,"rows":[{"usd":0}]}',
        b'{"format":1,"query":{"region":"here"},"fetched_at_s":1e9,"rows":[{"usd":-1}]}',
        b'{"format":1,"query":{"region":"here"},"fetched_at_s":1e9,"rows":[{"usd":"5"}]}',
        b'{"format":1,"query":{"region":"there"},"fetched_at_s":1e9,"rows":[{"usd":5}]}',
        b'{"format":2,"query":{"region":"here"},"fetched_at_s":1e9,"rows":[{"usd":5}]}',
        b'{"format":1,"query":{"region":"here"},"fetched_at_s":2e9,"rows":[{"usd":5}]}',
        b"cos\nsystem\n(S'true'\ntR.",
    ],
    ids=lambda content: repr(content[:70]),
)
def test_damaged_file_is_ignored_and_replaced(api: Api, folder: Path, content: bytes) -> None:
    api.read()
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert api.read().rows == (Row(2.0),)
    assert msgspec.json.decode(file.read_bytes())["rows"] == [{"usd": 2.0}]


def test_without_a_writable_directory_the_process_keeps_answers(api: Api, folder: Path) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("not a directory")
    api.read()
    assert api.read().rows == (Row(1.0),)
    assert api.requests == 1


def test_problem_is_noted_once(api: Api) -> None:
    remarks: dict[str, None] = {}
    api.error = OSError("no route")
    for _ in range(2):
        note_problem(remarks, "Prices in x", api.read())
    assert list(remarks) == ["Prices in x: no route"]
    api.error = None
    api.now_s += 100
    note_problem(remarks, "Prices in y", api.read())
    assert len(remarks) == 1
