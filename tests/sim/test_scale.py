"""Many agents of one run: nothing breaks, and the bucket's bill stays small."""

from spotfit_localsim.virtual.scale import churn_scenario, measure


def test_hundred_agents_survive_churn_at_low_cost() -> None:
    story, bill = measure(churn_scenario(100, minutes=1.0), seed=1)
    assert story.outcome == "cancelled"
    assert story.view.checkpoints, "nothing was learnt on the way"
    assert story.rounds >= 2
    assert bill.usd_per_agent_hour < 0.01
