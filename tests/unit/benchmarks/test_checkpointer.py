"""What the readings of a few pairs are taken to say."""

from benchmarks.checkpointer import CLAIMS, Claim

READINGS = [{"theirs_s": 4.0, "ours_s": 2.0}, {"theirs_s": 9.0, "ours_s": 3.0}] * 2


def test_a_claim_is_the_median_of_the_ratios_of_pairs() -> None:
    judged = Claim("theirs / ours", "theirs_s", "ours_s", 2.5).judged(READINGS)
    assert (judged["ratio"], judged["lower"]) == (2.5, 2.0)
    assert (judged["ours"], judged["theirs"]) == (2.5, 6.5)


def test_pooled_it_is_one_ratio_of_all_pairs_together() -> None:
    judged = Claim("theirs / ours", "theirs_s", "ours_s", 2.5, pooled=True).judged(READINGS)
    assert judged["ratio"] == judged["lower"] == 26.0 / 10.0


def test_what_is_asked_of_steps_counts_pairs_without_a_save_too() -> None:
    assert [claim.pooled for claim in CLAIMS["steps"]] == [False, True]
