"""Answers of price APIs, kept on the user's machine with the time at which they were given.

State of an answer:

    (none)   | the API answers                       | fresh
    fresh    | `max_age_s` later                     | stale
    stale    | the API answers                       | fresh
    stale    | the API is denied or does not answer  | stale; used with its age, asked again after
             |                                       | `RETRY_INTERVAL_S`
    any      | the file is damaged                   | (none)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar, cast

import msgspec

from spotfit.core.codec import DECODE_ERRORS, encode
from spotfit.core.errors import ProvisionError, SpotfitError
from spotfit.core.units import format_seconds
from spotfit.host import log, system, user_cache

SPOT_MAX_AGE_S = 3600.0
"""Spot prices of a zone change a few times a day, by a few percent."""
ON_DEMAND_MAX_AGE_S = 24 * 3600.0
RETRY_INTERVAL_S = 60.0
"""An API that was denied or did not answer is asked again after this time."""
_CLOCK_TOLERANCE_S = 300.0
_UNEXPECTED_FORM: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, AttributeError)
"""What reading an answer raises that lacks fields, or has others than documented."""
_COMMON_ERRORS: tuple[type[Exception], ...] = (ProvisionError, OSError, *_UNEXPECTED_FORM)
_FORMAT = 1

PositivePrice = Annotated[float, msgspec.Meta(gt=0)]
"""The type of prices in rows: a file with a price of 0 or less is damaged."""
RowT = TypeVar("RowT", bound=msgspec.Struct)


class StoredAnswer(msgspec.Struct, Generic[RowT], frozen=True, kw_only=True):
    """The content of a file."""

    format: int
    query: dict[str, str]
    """What was asked. Files are named by its digest."""
    fetched_at_s: float
    rows: list[RowT]


@dataclass(frozen=True, slots=True)
class CachedRows(Generic[RowT]):
    """The rows of the latest answer."""

    rows: tuple[RowT, ...] = ()
    as_of_s: float = 0.0
    """When the source stated them, in seconds since 1970-01-01 UTC; 0 without an answer."""
    problem: str = ""
    """Why there is no answer, or none that is fresh; '' for a fresh one."""


class PriceCache:
    """Reads answers from the files of the user, and asks if there is none that is fresh.

    Where no file can be written, answers are kept by this object.
    """

    def __init__(self, wall_s: Callable[[], float] = lambda: system.wall_ms() / 1000) -> None:
        # The wall clock: the age of a file is compared between processes, also after a restart.
        self._wall_s = wall_s
        self._unwritten: dict[str, bytes] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """Time and reason of the last failed request, by file."""

    def now_s(self) -> float:
        """Return the time in seconds since 1970-01-01 UTC."""
        return self._wall_s()

    def read(
        self,
        query: Mapping[str, str],
        row_type: type[RowT],
        fetch: Callable[[], Sequence[RowT]],
        *,
        max_age_s: float,
        errors: tuple[type[Exception], ...] = (),
    ) -> CachedRows[RowT]:
        """Return the rows for `query`, from the cache if they are at most `max_age_s` old.

        `fetch` asks the API and reads its answer. A `ProvisionError`, an `OSError`, `errors` of the
        client library, and those of an answer in an unexpected form become `CachedRows.problem`;
        the rows of the previous answer are returned then.
        """
        name = f"prices/{hashlib.sha256(encode(dict(query))).hexdigest()[:32]}.json"
        stored = self._load(name, query, row_type)
        if stored is not None and self._wall_s() - stored.fetched_at_s < max_age_s:
            return CachedRows(tuple(stored.rows), stored.fetched_at_s)
        failed_at_s, problem = self._failures.get(name, (float("-inf"), ""))
        if not 0 <= self._wall_s() - failed_at_s < RETRY_INTERVAL_S:
            expected: tuple[type[Exception], ...] = (*_COMMON_ERRORS, *errors)
            try:
                return self._store(name, query, fetch())
            except expected as error:
                problem = _describe(error)
                log.warning("prices.unavailable", query=dict(query), error=error)
                self._failures[name] = (self._wall_s(), problem)
        if stored is None:
            return CachedRows(problem=problem)
        age_s = max(0.0, self._wall_s() - stored.fetched_at_s)
        return CachedRows(
            tuple(stored.rows),
            stored.fetched_at_s,
            f"{problem.rstrip('.')}. The prices are {format_seconds(age_s)} old.",
        )

    def _store(self, name: str, query: Mapping[str, str], rows: Sequence[RowT]) -> CachedRows[RowT]:
        now_s = self._wall_s()
        body = encode(
            StoredAnswer(format=_FORMAT, query=dict(query), fetched_at_s=now_s, rows=list(rows))
        )
        if not user_cache.write_cached(name, body):
            self._unwritten[name] = body
        self._failures.pop(name, None)
        return CachedRows(tuple(rows), now_s)

    def _load(
        self, name: str, query: Mapping[str, str], row_type: type[RowT]
    ) -> StoredAnswer[RowT] | None:
        body = self._unwritten.get(name) or user_cache.read_cached(name)
        if body is None:
            return None
        try:
            # A generic type that mypy cannot parametrise by a value.
            answer = msgspec.json.decode(body, type=StoredAnswer[row_type])  # type: ignore[valid-type]
        except DECODE_ERRORS as error:
            log.warning("prices.damaged_file", file=name, error=error)
            return None
        is_of_the_future = answer.fetched_at_s > self._wall_s() + _CLOCK_TOLERANCE_S
        if answer.format != _FORMAT or answer.query != dict(query) or is_of_the_future:
            return None
        return cast("StoredAnswer[RowT]", answer)


def _describe(error: Exception) -> str:
    if isinstance(error, SpotfitError):
        return f"{error.message} {error.do}".strip()
    if isinstance(error, _UNEXPECTED_FORM):
        return f"The answer has an unexpected form: {type(error).__name__}: {error}"
    return str(error) or type(error).__name__


def note_problem(remarks: dict[str, None], what: str, answer: CachedRows[RowT]) -> CachedRows[RowT]:
    """Add the problem of `answer` to `remarks`, which keep their order; return `answer`.

    `what` are the prices that it is about, such as 'Spot prices in us-east-1'.
    """
    if answer.problem:
        remarks[f"{what}: {answer.problem}"] = None
    return answer
