"""A run with many agents has no violation and low request costs."""

from spotfit_localsim.virtual.scale import churn_scenario, measure


def test_hundred_agents_survive_churn_at_low_cost() -> None:
    result, cost = measure(churn_scenario(100, minutes=1.0), seed=1)
    assert result.outcome == "cancelled"
    assert result.view.checkpoints, "checkpoints were committed"
    assert result.rounds >= 2
    assert cost.usd_per_agent_hour < 0.01
