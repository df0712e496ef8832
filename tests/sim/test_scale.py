"""Many agents of one run: nothing breaks, and the bucket's bill stays small."""

from spotfit_localsim.scale import churn, measure


def test_a_hundred_agents_survive_churn_for_cents() -> None:
    story, bill = measure(churn(100, minutes=1.0), seed=1)
    assert story.outcome == "cancelled"
    assert story.view.checkpoints, "nothing was learnt on the way"
    assert story.rounds >= 2
    assert bill.dollars_per_agent_hour < 0.01
