"""'Did you mean …': the nearest word and all there are."""

from spotfit.core.nearest import did_you_mean


def test_a_slip_is_recognised() -> None:
    hint = did_you_mean("lokal", ["local", "kubernetes"])
    assert hint == "Did you mean 'local'? Known: kubernetes, local."


def test_a_word_like_none_of_them_is_only_told_what_there_is() -> None:
    assert did_you_mean("zzz", ["local", "aws"]) == "Known: aws, local."


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert did_you_mean("local", []) == ""
