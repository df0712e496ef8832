"""lightgbm.train in segments: an interrupted training gives the model of an undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest

lightgbm = pytest.importorskip("lightgbm")

import numpy  # noqa: E402

from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.lightgbm import RayTrainReportCallback, train  # noqa: E402
from spotfit.worker.local_session import LocalSession  # noqa: E402
from spotfit.worker.training_api import use_session  # noqa: E402

ROUNDS = 12
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bagging": {"bagging_fraction": 0.6, "bagging_freq": 1, "feature_fraction": 0.7, "seed": 5},
    "own seeds": {"bagging_fraction": 0.6, "bagging_freq": 1, "bagging_seed": 9},
    "goss": {"data_sample_strategy": "goss", "learning_rate": 0.5},
    "dart": {"boosting": "dart", "drop_rate": 0.5},
    "extra trees": {"extra_trees": True},
}


class InterruptedTrainingError(Exception):
    """Ends a training as a lost machine does."""


class InterruptAt:
    """Raises before a round; records the rounds that it has seen."""

    before_iteration = True

    def __init__(self, at_round: int | None) -> None:
        self.at_round = at_round
        self.rounds: list[int] = []

    def __call__(self, env: Any) -> None:
        if env.iteration == self.at_round:
            raise InterruptedTrainingError
        self.rounds.append(env.iteration)


def data() -> tuple[Any, Any]:
    rng = numpy.random.default_rng(3)
    features = rng.normal(size=(400, 5))
    labels = (features[:, 0] + rng.normal(size=400) > 0).astype(int)
    rows = lightgbm.Dataset(features[:300], label=labels[:300])
    return rows, lightgbm.Dataset(features[300:], label=labels[300:], reference=rows)


def run(
    session: LocalSession, params: dict[str, Any], interrupt_at: int | None = None, **options: Any
) -> tuple[Any, InterruptAt]:
    rows, evaluated = data()
    interrupt = InterruptAt(interrupt_at)
    with use_session(session):
        model = train(
            {"objective": "binary", "max_depth": 3, "verbosity": -1, **params},
            rows,
            ROUNDS,
            valid_sets=[rows, evaluated],
            valid_names=["train", "test"],
            callbacks=[interrupt, *options.pop("callbacks", ())],
            **({"rounds_per_segment": 5} | options),
        )
    return model, interrupt


def next_round(session: LocalSession) -> LocalSession:
    """The session of a function that is called again after a loss."""
    result = LocalSession("run")
    result.last_checkpoint = session.last_checkpoint
    return result


def interrupted(params: dict[str, Any], at_round: int, **options: Any) -> tuple[Any, LocalSession]:
    """Train, interrupt and train again; return the model."""
    session = LocalSession("run")
    callbacks = options.pop("callbacks", list)
    with pytest.raises(InterruptedTrainingError):
        run(session, params, at_round, callbacks=callbacks(), **options)
    session = next_round(session)
    model, again = run(session, params, callbacks=callbacks(), **options)
    assert again.rounds[0] == at_round // 5 * 5, "only the rounds of one segment are repeated"
    return model, session


def trees(model: Any) -> str:
    text = str(model.model_to_string(num_iteration=-1))
    return text.partition("parameters:")[0]


@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("at_round", [6, 10])
def test_an_interruption_does_not_change_the_model(params: dict[str, Any], at_round: int) -> None:
    calm_session = LocalSession("calm")
    calm, _ = run(calm_session, params)
    model, session = interrupted(params, at_round)
    assert model.model_to_string() == calm.model_to_string()
    assert model.current_iteration() == ROUNDS
    assert session.metrics == calm_session.metrics


def test_without_sampling_the_model_is_that_of_the_library() -> None:
    rows, _ = data()
    params = {"objective": "binary", "max_depth": 3, "verbosity": -1}
    params |= {"deterministic": True, "force_row_wise": True}
    model, _ = run(LocalSession("run"), params)
    expected = lightgbm.train(params, rows, ROUNDS)
    unseen = data()[0].data
    assert numpy.array_equal(model.predict(unseen), expected.predict(unseen))


def test_segments_draw_different_samples() -> None:
    """With one seed in all segments, the same rows would be drawn in each."""
    params = {"bagging_fraction": 0.3, "bagging_freq": 1, "learning_rate": 1e-4}
    model, _ = run(LocalSession("run"), params)
    drawn = [tree["tree_structure"] for tree in model.dump_model()["tree_info"]]
    thresholds = [round(tree["threshold"], 6) for tree in drawn]
    assert thresholds[1:5] != thresholds[6:10]


def test_early_stopping_continues_after_an_interruption() -> None:
    options = {"callbacks": lambda: [lightgbm.early_stopping(4, verbose=False)]}
    params = {"learning_rate": 1.0}
    calm, seen = run(LocalSession("calm"), params, callbacks=options["callbacks"]())
    stopped_at = len(seen.rounds)
    assert 5 < stopped_at < ROUNDS, "else the test shows nothing"
    model, session = interrupted(params, stopped_at - 1, **options)
    assert model.model_to_string() == calm.model_to_string()
    assert model.current_iteration() == calm.best_iteration == stopped_at - 4
    _, none_seen = run(next_round(session), params, callbacks=options["callbacks"]())
    assert none_seen.rounds == [], "it has ended"


def test_early_stopping_in_the_parameters_continues_after_an_interruption() -> None:
    params = {"learning_rate": 1.0, "early_stopping_rounds": 4, "n_estimators": 11}
    calm, seen = run(LocalSession("calm"), params)
    model, _ = interrupted(params, len(seen.rounds) - 1)
    assert model.model_to_string() == calm.model_to_string()


@pytest.mark.parametrize("params", [{"learning_rate": 1.0, "early_stopping_rounds": 4}, {}])
def test_the_best_results_are_known_after_a_loss_at_the_end(params: dict[str, Any]) -> None:
    session = LocalSession("run")
    calm, _ = run(session, params)
    model, seen = run(next_round(session), params)
    assert seen.rounds == []
    assert model.best_iteration == calm.best_iteration
    assert (calm.best_iteration > 0) == bool(params)
    assert model.best_score == calm.best_score
    assert set(calm.best_score) == {"train", "test"}


def test_recorded_evaluations_are_those_of_the_whole_run() -> None:
    calm: dict[str, Any] = {}
    run(LocalSession("calm"), {}, callbacks=[lightgbm.record_evaluation(calm)])
    results: dict[str, Any] = {}
    interrupted({}, 6, callbacks=lambda: [lightgbm.record_evaluation(results)])
    assert results == calm
    assert len(results["test"]["binary_logloss"]) == ROUNDS


def test_a_schedule_of_learning_rates_is_that_of_the_run() -> None:
    rates = [0.5**number for number in range(ROUNDS)]
    rows, _ = data()
    params = {"objective": "binary", "max_depth": 3, "verbosity": -1}
    params |= {"deterministic": True, "force_row_wise": True}
    model, _ = run(
        LocalSession("run"), params, callbacks=[lightgbm.reset_parameter(learning_rate=rates)]
    )
    expected = lightgbm.train(
        params, rows, ROUNDS, callbacks=[lightgbm.reset_parameter(learning_rate=rates)]
    )
    unseen = data()[0].data
    assert numpy.array_equal(model.predict(unseen), expected.predict(unseen))


def test_metrics_are_selected_by_a_report_callback() -> None:
    session = LocalSession("run")
    reporter = RayTrainReportCallback(metrics={"loss": "test-binary_logloss"}, filename="trees.txt")
    run(session, {}, callbacks=[reporter])
    assert list(session.metrics or {}) == ["loss"]
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    model = RayTrainReportCallback.get_model(checkpoint, "trees.txt")
    assert model.current_iteration() == ROUNDS


def test_a_single_evaluation_set_needs_no_list() -> None:
    session = LocalSession("run")
    rows, evaluated = data()
    with use_session(session):
        train(
            {"objective": "binary", "metric": "auc", "verbosity": -1},
            rows,
            3,
            valid_sets=evaluated,
            valid_names="test",
        )
    assert list(session.metrics or {}) == ["test-auc"]


def test_training_from_a_model_adds_rounds_to_it() -> None:
    first, _ = run(LocalSession("first"), {})
    both, seen = run(LocalSession("both"), {}, init_model=first)
    assert both.current_iteration() == 2 * ROUNDS
    assert seen.rounds == list(range(ROUNDS, 2 * ROUNDS))


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"boosting": "rf"}, {}, "rf"),
        ({"num_trees": 0}, {}, "at least 1"),
        ({}, {"callbacks": [RayTrainReportCallback(frequency=2)]}, "rounds_per_segment"),
    ],
)
def test_what_cannot_be_continued_is_rejected(
    params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(LocalSession("run"), params, **options)


@pytest.mark.parametrize("number", [0, 1], ids=["training", "validation"])
def test_initial_scores_with_several_segments_are_rejected(number: int) -> None:
    sets = data()
    sets[number].set_init_score(numpy.ones(len(sets[number].data)))
    with use_session(LocalSession("run")), pytest.raises(ConfigError, match="init_score"):
        train({}, sets[0], 3, valid_sets=[sets[1]], rounds_per_segment=2)


def test_initial_scores_with_one_segment_are_those_of_the_library() -> None:
    params = {"objective": "binary", "verbosity": -1, "deterministic": True, "force_row_wise": True}
    rows, same_rows = data()[0], data()[0]
    for dataset in (rows, same_rows):
        dataset.set_init_score(numpy.linspace(-2, 2, len(dataset.data)))
    with use_session(LocalSession("run")):
        model = train(params, rows, 3, rounds_per_segment=3)
    assert trees(model) == trees(lightgbm.train(params, same_rows, 3))


def test_a_second_training_in_one_function_is_rejected() -> None:
    session = LocalSession("run")
    run(session, {})
    with pytest.raises(ConfigError, match="called before in this training function"):
        run(session, {"max_depth": 5})


def test_a_constructed_dataset_is_rejected() -> None:
    rows, _ = data()
    with (
        use_session(LocalSession("run")),
        pytest.raises(ConfigError, match="is constructed already"),
    ):
        train({}, rows.construct(), 3)
