"""One seed, many streams."""

from spotfit_localsim.dice import Dice


def test_a_stream_depends_on_the_seed_and_its_name_only() -> None:
    one, other = Dice(7), Dice(7)
    one.stream("wire").random()
    assert one.stream("market").random() == other.stream("market").random()
    assert one.stream("market").random() != one.stream("wire").random()
    assert one.stream("market").random() != Dice(8).stream("market").random()


def test_what_never_happens_draws_nothing() -> None:
    stream, untouched = Dice(1).stream("x"), Dice(1).stream("x")
    assert not stream.chance(0.0)
    assert stream.gap(0.0) == 0
    assert stream.between((3.0, 3.0)) == 3.0
    assert stream.random() == untouched.random()


def test_a_gap_is_as_long_as_the_chance_says() -> None:
    stream = Dice(1).stream("x")
    gaps = [stream.gap(0.01) for _ in range(2000)]
    assert min(gaps) >= 1
    assert 90 < sum(gaps) / len(gaps) < 110
