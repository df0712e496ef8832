"""Parsing of recorded events and of CPU pressure."""

from pathlib import Path

from benchmarks.peers import OURS
from benchmarks.run_once import Job, _job_config, parse_events, parse_pressure


def recorded(*lines: str) -> list[str]:
    return [line + "\n" for line in lines]


def test_when_all_is_the_time_of_the_last_rank() -> None:
    events = parse_events(
        recorded(
            '{"event": "first_line", "at": 5.0, "fit": 0, "rank": 0}',
            '{"event": "first_line", "at": 9.0, "fit": 0, "rank": 1, "entered": 7.0}',
        )
    )
    assert events.when_all("first_line", 2) == 7.0
    assert events.when_all("first_line", 3) is None


def test_events_are_selected_by_fit_and_fields() -> None:
    events = parse_events(
        recorded(
            '{"event": "attempt_started", "at": 1.0, "fit": 0, "rank": 0, "attempt": 0}',
            '{"event": "attempt_started", "at": 2.0, "fit": 0, "rank": 0, "attempt": 1}',
            '{"event": "attempt_started", "at": 3.0, "fit": 1, "rank": 0, "attempt": 1}',
        )
    )
    assert [event.at for event in events.named("attempt_started", attempt=1)] == [2.0, 3.0]
    assert [event.at for event in events.named("attempt_started", attempt=1, fit=1)] == [3.0]


def test_incomplete_line_is_skipped() -> None:
    complete_line = '{"event": "killed", "at": 1.0, "fit": 0, "rank": 1}\n'
    assert len(parse_events([complete_line, '{"event": "kil']).every) == 1


def test_storage_path_is_that_of_the_job_or_a_temporary_directory(tmp_path: Path) -> None:
    named = _job_config(tmp_path / "a", OURS, Job("upload", storage="s3://bucket/runs"))
    own = _job_config(tmp_path / "b", OURS, Job("upload"))
    assert (named["storage"], own["storage"]) == ("s3://bucket/runs", str(tmp_path / "b/storage"))


def test_pressure_is_the_some_line() -> None:
    text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00\n"
    assert parse_pressure(text) == 12.5
