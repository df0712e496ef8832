"""One seed, many streams."""

from spotfit_localsim.random_streams import SeededStreams


def test_a_stream_depends_on_the_seed_and_its_name_only() -> None:
    one, other = SeededStreams(7), SeededStreams(7)
    one.stream("wire").random()
    assert one.stream("market").random() == other.stream("market").random()
    assert one.stream("market").random() != one.stream("wire").random()
    assert one.stream("market").random() != SeededStreams(8).stream("market").random()


def test_what_never_happens_draws_nothing() -> None:
    stream, untouched = SeededStreams(1).stream("x"), SeededStreams(1).stream("x")
    assert not stream.bernoulli(0.0)
    assert stream.geometric(0.0) == 0
    assert stream.uniform_in((3.0, 3.0)) == 3.0
    assert stream.random() == untouched.random()


def test_a_gap_is_as_long_as_the_chance_says() -> None:
    stream = SeededStreams(1).stream("x")
    gaps = [stream.geometric(0.01) for _ in range(2000)]
    assert min(gaps) >= 1
    assert 90 < sum(gaps) / len(gaps) < 110
