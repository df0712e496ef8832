"""State that would be lost is rejected, and unused components are listed."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.compatibility import (
    LOADER_COMPONENT,
    OPTIMIZER_COMPONENT,
    StateCompatibility,
    StateComponent,
    new_components,
    reject_mismatches,
    reject_moved_components,
    reject_other_optimizer_type,
    reject_unclaimed_state,
    unused_components,
)

EMA, STREAM = ("extra", "ema"), ("per_rank", "stream")


def compatibility(*names: str, current: StateComponent = OPTIMIZER_COMPONENT) -> StateCompatibility:
    return StateCompatibility(frozenset(names), frozenset(), frozenset([current]))


def with_components(saved: set[StateComponent], current: set[StateComponent]) -> StateCompatibility:
    return StateCompatibility(frozenset(), frozenset(saved), frozenset(current))


def test_weights_that_no_rank_has_are_rejected() -> None:
    stages = [compatibility("model.w2", "model.w3"), compatibility("model.w0", "model.w3")]
    with pytest.raises(
        ConfigError, match=r"does not match the model of the Checkpointer: model\.w3 would be lost"
    ):
        reject_unclaimed_state(stages)
    reject_unclaimed_state([*stages, compatibility()])


def test_long_lists_of_names_are_summarized() -> None:
    with pytest.raises(ConfigError, match=r"model\.w0, .*model\.w4 and 2 more would be lost"):
        reject_unclaimed_state([compatibility(*(f"model.w{n}" for n in range(7)))])


def test_optimizer_state_of_parameters_in_no_optimizer_is_rejected() -> None:
    stages = [
        compatibility("optimizer.state.w1", "optimizer.state.w2"),
        compatibility("optimizer.state.w2"),
    ]
    with pytest.raises(ConfigError, match=r"state of w2 would be lost: no optimizer holds"):
        reject_unclaimed_state(stages)
    reject_unclaimed_state([*stages, compatibility()])


def test_lost_param_groups_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"2 saved param_groups would be lost") as error:
        reject_unclaimed_state(
            [compatibility("optimizer.param_groups.1", "optimizer.param_groups.2")] * 2
        )
    assert "Without optimizer= only the model is restored" in error.value.do


def test_without_any_optimizer_the_model_is_restored_alone() -> None:
    names = ("optimizer.state.w0", "optimizer.param_groups.0")
    without = compatibility(*names, current=EMA)
    reject_unclaimed_state([without, without])
    with pytest.raises(ConfigError, match="state of w0 would be lost"):
        reject_unclaimed_state([without, compatibility(*names)])
    with pytest.raises(ConfigError, match=r"does not match the model of the Checkpointer"):
        reject_unclaimed_state([compatibility("model.w0", current=EMA)])


def test_components_that_no_rank_has_are_unused() -> None:
    fits = [
        with_components({EMA, OPTIMIZER_COMPONENT}, {EMA}),
        with_components({EMA, STREAM}, set()),
    ]
    assert unused_components(fits) == ["optimizer", "stream"]
    assert unused_components([*fits, with_components(set(), {STREAM})]) == ["optimizer"]


def test_components_that_were_not_saved_are_new() -> None:
    fits = [
        with_components({EMA}, {EMA, OPTIMIZER_COMPONENT}),
        with_components(set(), {STREAM, OPTIMIZER_COMPONENT}),
    ]
    assert new_components(fits) == ["optimizer", "stream"]
    assert new_components([*fits, with_components({STREAM, OPTIMIZER_COMPONENT}, set())]) == []


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (
            {("extra", "it")},
            {("per_rank", "it")},
            r"'it' was saved under extra= but is passed as per_rank=",
        ),
        (
            {("per_rank", "it")},
            {("extra", "it")},
            r"'it' was saved under per_rank= but is passed as extra=",
        ),
    ],
)
def test_moved_components_are_rejected(
    saved: set[StateComponent], current: set[StateComponent], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reject_moved_components(frozenset(saved), frozenset(current))


def test_unchanged_new_and_removed_components_have_not_moved() -> None:
    reject_moved_components(frozenset({EMA, STREAM}), frozenset({EMA, ("per_rank", "other")}))
    both = frozenset({("extra", "it"), ("per_rank", "it")})
    reject_moved_components(both, frozenset({("per_rank", "it")}))
    reject_moved_components(frozenset({("per_rank", "it")}), both)


def test_a_loader_is_not_confused_with_an_object_of_that_name() -> None:
    """A loader and an object with its name are different components."""
    reject_moved_components(frozenset({("extra", "loader")}), frozenset({LOADER_COMPONENT}))
    reject_moved_components(frozenset({LOADER_COMPONENT}), frozenset({("extra", "loader")}))


def test_another_optimizer_class_is_recognized_by_its_options() -> None:
    sgd, adam = {"lr", "momentum"}, {"lr", "betas"}
    with pytest.raises(
        ConfigError, match=r"different optimizer class: its options include momentum, but not betas"
    ):
        reject_other_optimizer_type(sgd, adam)


def test_added_or_removed_options_are_accepted() -> None:
    """Newer versions of torch and schedulers add options."""
    reject_other_optimizer_type({"lr"}, {"lr", "capturable"})
    reject_other_optimizer_type({"lr", "capturable"}, {"lr"})
    reject_other_optimizer_type({"lr", "max_lr", "initial_lr"}, {"lr", "capturable", "swa_lr"})


@pytest.mark.parametrize(
    ("missing", "wrong", "message"),
    [
        (
            ["model.w", "optimizer.param_groups.1.lr"],
            ["model.v is (2,), was (1,)"],
            r"model and optimizer of the Checkpointer: model\.w was not saved; "
            r"model\.v is \(2,\), was \(1,\)\.",
        ),
        (
            [f"optimizer.param_groups.{n}.{one}" for n in (1, 2) for one in ("lr", "betas")],
            [],
            "has 2 more param_groups",
        ),
        (["optimizer.state.w.exp_avg"], [], r"Optimizer state w\.exp_avg is missing"),
    ],
)
def test_missing_names_are_described_by_kind(
    missing: list[str], wrong: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reject_mismatches(missing, wrong)


def test_a_complete_state_is_accepted() -> None:
    reject_mismatches([], [])
