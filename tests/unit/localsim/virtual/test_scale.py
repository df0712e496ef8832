"""The cost of the bucket, and the fold that agents of a large simulation share."""

from collections import Counter

import pytest

from spotfit.ledger import journal
from spotfit_localsim.virtual import scale


def test_cost_is_per_agent_and_hour_at_list_prices() -> None:
    cost = scale.BucketCost(Counter(put=1000, get=10_000, list=500, create=500), agent_hours=2.0)
    assert cost.requests_per_agent_hour == {"create": 250, "get": 5000, "list": 250, "put": 500}
    assert cost.usd_per_agent_hour == pytest.approx(0.005 + 0.002)
    assert "5000.00" in str(cost)


def test_churn_scenario_has_the_configured_reclaim_rate() -> None:
    scenario = scale.churn_scenario(1000, 10.0, reclaimed_fraction_per_minute=0.1)
    assert scenario.market.reclaims_per_hour == pytest.approx(6.0)
    assert scenario.faults_duration_s == 600.0
    assert scenario.min_workers == 500


def test_shared_fold_is_undone_after_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = vars(journal)["fold"]
    assert scale.main(["--agents", "8", "--minutes", "0.5"]) == 0
    assert "no invariant violated" in capsys.readouterr().out
    assert vars(journal)["fold"] is before
