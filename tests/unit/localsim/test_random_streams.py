"""Independent random streams from one seed."""

from spotfit_localsim.random_streams import SeededStreams


def test_stream_depends_on_the_seed_and_its_name_only() -> None:
    one, other = SeededStreams(7), SeededStreams(7)
    one.stream("network").random()
    assert one.stream("market").random() == other.stream("market").random()
    assert one.stream("market").random() != one.stream("network").random()
    assert one.stream("market").random() != SeededStreams(8).stream("market").random()


def test_degenerate_distributions_draw_no_random_number() -> None:
    stream, untouched = SeededStreams(1).stream("x"), SeededStreams(1).stream("x")
    assert not stream.bernoulli(0.0)
    assert stream.geometric(0.0) == 0
    assert stream.uniform_in((3.0, 3.0)) == 3.0
    assert stream.random() == untouched.random()


def test_geometric_gaps_have_the_configured_mean() -> None:
    stream = SeededStreams(1).stream("x")
    gaps = [stream.geometric(0.01) for _ in range(2000)]
    assert min(gaps) >= 1
    assert 90 < sum(gaps) / len(gaps) < 110
