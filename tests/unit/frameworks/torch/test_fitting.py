"""What would be lost is refused in words, and what is not asked for any more is told."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.fitting import (
    LOADER,
    OPTIMIZER,
    Fit,
    Part,
    new,
    refuse_left,
    refuse_moved,
    refuse_other_kind,
    refuse_others,
    unused,
)

EMA, STREAM = ("extra", "ema"), ("own", "stream")


def fit(*left: str, given: Part = OPTIMIZER) -> Fit:
    return Fit(frozenset(left), frozenset(), frozenset([given]))


def beside(kept: set[Part], given: set[Part]) -> Fit:
    return Fit(frozenset(), frozenset(kept), frozenset(given))


def test_weights_that_no_rank_has_a_place_for_are_refused() -> None:
    stages = [fit("model.w2", "model.w3"), fit("model.w0", "model.w3")]
    with pytest.raises(ConfigError, match=r"another model: model\.w3 would be lost"):
        refuse_left(stages)
    refuse_left([*stages, fit()])


def test_of_many_weights_some_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.w0, .*model\.w4 and 2 more would be lost"):
        refuse_left([fit(*(f"model.w{n}" for n in range(7)))])


def test_what_optimizers_knew_of_weights_that_none_learns_is_refused() -> None:
    stages = [fit("optimizer.state.w1", "optimizer.state.w2"), fit("optimizer.state.w2")]
    with pytest.raises(ConfigError, match=r"an optimizer knew of w2 would be lost.*none learns"):
        refuse_left(stages)
    refuse_left([*stages, fit()])


def test_groups_that_would_be_lost_with_their_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 groups of weights would be lost") as refused:
        refuse_left([fit("optimizer.param_groups.1", "optimizer.param_groups.2")] * 2)
    assert "Without optimizer= the model goes on alone" in refused.value.do


def test_a_model_goes_on_alone_where_no_rank_has_an_optimizer() -> None:
    known = ("optimizer.state.w0", "optimizer.param_groups.0")
    without = fit(*known, given=EMA)
    refuse_left([without, without])
    with pytest.raises(ConfigError, match="knew of w0"):
        refuse_left([without, fit(*known)])
    with pytest.raises(ConfigError, match="another model"):
        refuse_left([fit("model.w0", given=EMA)])


def test_what_no_rank_is_given_any_more_is_unused() -> None:
    fits = [beside({EMA, OPTIMIZER}, {EMA}), beside({EMA, STREAM}, set())]
    assert unused(fits) == ["optimizer", "stream"]
    assert unused([*fits, beside(set(), {STREAM})]) == ["optimizer"]


def test_what_a_rank_is_given_and_was_not_saved_is_new() -> None:
    fits = [beside({EMA}, {EMA, OPTIMIZER}), beside(set(), {STREAM, OPTIMIZER})]
    assert new(fits) == ["optimizer", "stream"]
    assert new([*fits, beside({STREAM, OPTIMIZER}, set())]) == []


@pytest.mark.parametrize(
    ("kept", "given", "told"),
    [
        ({("extra", "it")}, {("own", "it")}, r"'it' was kept in extra=\{…\}, not own="),
        ({("own", "it")}, {("extra", "it")}, r"'it' was kept in own=\{…\}, not extra="),
    ],
)
def test_what_has_moved_is_refused(kept: set[Part], given: set[Part], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        refuse_moved(frozenset(kept), frozenset(given))


def test_what_is_where_it_was_or_new_or_gone_has_not_moved() -> None:
    refuse_moved(frozenset({EMA, STREAM}), frozenset({EMA, ("own", "other")}))
    both = frozenset({("extra", "it"), ("own", "it")})
    refuse_moved(both, frozenset({("own", "it")}))
    refuse_moved(frozenset({("own", "it")}), both)


def test_a_loader_has_not_moved_from_an_object_of_its_name() -> None:
    """It was left to begin anew before anything was told of it."""
    refuse_moved(frozenset({("extra", "loader")}), frozenset({LOADER}))
    refuse_moved(frozenset({LOADER}), frozenset({("extra", "loader")}))


def test_an_optimizer_of_another_kind_is_told_by_its_options() -> None:
    sgd, adam = {"lr", "momentum"}, {"lr", "betas"}
    with pytest.raises(ConfigError, match=r"another kind .* that had momentum, and no betas"):
        refuse_other_kind(sgd, adam)


def test_options_that_come_or_go_make_no_other_kind() -> None:
    """A later torch has more of them, and schedulers write theirs."""
    refuse_other_kind({"lr"}, {"lr", "capturable"})
    refuse_other_kind({"lr", "capturable"}, {"lr"})
    refuse_other_kind({"lr", "max_lr", "initial_lr"}, {"lr", "capturable", "swa_lr"})


@pytest.mark.parametrize(
    ("missing", "wrong", "told"),
    [
        (
            ["model.w", "optimizer.param_groups.1.lr"],
            ["model.v is (2,), was (1,)"],
            r"another training: model\.w was not saved; model\.v is \(2,\), was \(1,\)\.",
        ),
        (
            [f"optimizer.param_groups.{n}.{one}" for n in (1, 2) for one in ("lr", "betas")],
            [],
            "more groups of weights than were saved, by 2",
        ),
        (["optimizer.state.w.exp_avg"], [], r"optimizer knows w\.exp_avg was not saved"),
    ],
)
def test_what_was_not_saved_is_told_in_its_own_words(
    missing: list[str], wrong: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        refuse_others(missing, wrong)


def test_what_was_saved_is_not_refused() -> None:
    refuse_others([], [])
