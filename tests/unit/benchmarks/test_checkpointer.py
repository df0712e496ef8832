"""Evaluation of claims."""

from benchmarks.checkpointer import CLAIMS, Claim

READINGS = [{"theirs_s": 4.0, "ours_s": 2.0}, {"theirs_s": 9.0, "ours_s": 3.0}] * 2


def test_claim_is_the_median_ratio_of_pairs() -> None:
    evaluated = Claim("theirs / ours", "theirs_s", "ours_s", 2.5).evaluate(READINGS)
    assert (evaluated["ratio"], evaluated["lower"]) == (2.5, 2.0)
    assert (evaluated["ours"], evaluated["theirs"]) == (2.5, 6.5)


def test_pooled_claim_is_the_ratio_of_sums() -> None:
    evaluated = Claim("theirs / ours", "theirs_s", "ours_s", 2.5, pooled=True).evaluate(READINGS)
    assert evaluated["ratio"] == evaluated["lower"] == 26.0 / 10.0


def test_steps_have_a_pooled_claim() -> None:
    assert [claim.pooled for claim in CLAIMS["steps"]] == [False, True]
