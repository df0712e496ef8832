"""`spotfit estimate` prints an estimate as text or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from spotfit.cli.main import app
from spotfit.core.errors import ConfigError

# Given prices: no API is called.
BACKEND = (
    'gcp_batch?project=p&region=r&image=i&machine_type=m&prices={"*":{"spot":1,"on_demand":3}}'
)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """A market whose machine is always available."""
    document = {"id": "zone-7", "kind": "availability", "gap_seconds": 600, "data": [1] * 12}
    (tmp_path / "zone.json").write_text(json.dumps(document))
    return tmp_path


def invoke(recordings: Path, *arguments: str) -> Result:
    options = ("--provisioner", BACKEND, "--workers", "2", "--training-time", "2h")
    folder = ("--recordings", str(recordings))
    return CliRunner().invoke(app, ["estimate", *options, *folder, *arguments])


def test_the_text_has_guarantee_offers_and_recordings(recordings: Path) -> None:
    shown = invoke(recordings, "--deadline", "3h", "--budget", "50", "--changeover", "10m").stdout
    assert "2 workers, 2.0 h of training, deadline in 3.0 h, budget $50" in shown
    assert "The deadline can be guaranteed: worst case $13.00, expected $4.33" in shown
    assert "zone-7" in shown


def test_json_has_the_figures(recordings: Path) -> None:
    record: dict[str, Any] = json.loads(invoke(recordings, "--changeover", "1h", "--json").stdout)
    assert record["usd"]["mean"] == pytest.approx(2 * 3.0)
    assert record["earliest_deadline_s"] == 3 * 3600
    assert {offer["market"]: offer["usd_per_hour"] for offer in record["offers"]} == {
        "spot": 1.0,
        "on_demand": 3.0,
    }


def test_an_elastic_group_is_estimated_with_the_machines_that_are_granted(recordings: Path) -> None:
    arguments = ("--min-workers", "1", "--changeover", "1h", "--restart", "30s", "--json")
    record: dict[str, Any] = json.loads(invoke(recordings, *arguments).stdout)
    assert (record["min_workers"], record["workers"], record["restart_s"]) == (1, 2, 30.0)
    assert record["usd"]["mean"] == pytest.approx(2 * 3.0)


def test_an_invalid_duration_is_an_error(recordings: Path) -> None:
    failed = invoke(recordings, "--deadline", "soon")
    assert isinstance(failed.exception, ConfigError)
    assert failed.exit_code == 1


def test_feeders_of_another_machine_type_are_part_of_the_estimate(recordings: Path) -> None:
    cheap = BACKEND.replace("machine_type=m", "machine_type=c").replace('"spot":1', '"spot":0.1')
    feeders = ("--feeders", "4", "--min-feeders", "2", "--feeder-cpus", "16")
    arguments = (*feeders, "--feeder-provisioner", cheap, "--changeover", "1h", "--json")
    record: dict[str, Any] = json.loads(invoke(recordings, *arguments).stdout)
    assert record["usd"]["mean"] == pytest.approx(2 * 3.0 + 2 * 0.1 * 2)
    assert record["feeders"] == {
        "min_machines": 2,
        "max_machines": 4,
        "usd_per_hour": 0.1,
        "expected_usd": pytest.approx(0.4),
        "highest_usd": pytest.approx(1.2),
    }
    alike: dict[str, Any] = json.loads(
        invoke(recordings, "--feeders", "1", "--changeover", "1h", "--json").stdout
    )
    assert alike["feeders"]["expected_usd"] == pytest.approx(2 * 1.0)
