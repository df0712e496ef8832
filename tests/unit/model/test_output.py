"""Whose lines they are."""

from spotfit.model.output import BESIDE, RUN, speaker


def test_every_line_has_a_speaker() -> None:
    assert [speaker(rank) for rank in (0, 12, BESIDE, RUN)] == [
        "rank 0",
        "rank 12",
        "beside",
        "run",
    ]
