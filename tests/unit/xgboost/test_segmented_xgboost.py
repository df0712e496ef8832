"""xgboost.train in segments: an interrupted training gives the model of an undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest

xgboost = pytest.importorskip("xgboost")

import numpy  # noqa: E402

from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.worker.local_session import LocalSession  # noqa: E402
from spotfit.worker.training_api import use_session  # noqa: E402
from spotfit.xgboost import RayTrainReportCallback, train  # noqa: E402

ROUNDS = 12
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"subsample": 0.6, "colsample_bytree": 0.7, "seed": 5},
    "dart": {"booster": "dart", "rate_drop": 0.3},
    "several trees": {"num_parallel_tree": 2, "subsample": 0.5},
}


class InterruptedTrainingError(Exception):
    """Ends a training as a lost machine does."""


class InterruptAt(xgboost.callback.TrainingCallback):  # type: ignore[misc, name-defined]  # no types
    """Raises before a round; records the rounds that it has seen."""

    def __init__(self, at_round: int | None) -> None:
        super().__init__()
        self.at_round = at_round
        self.rounds: list[int] = []

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == self.at_round:
            raise InterruptedTrainingError
        self.rounds.append(epoch)
        return False


def data() -> tuple[Any, Any]:
    rng = numpy.random.default_rng(3)
    features = rng.normal(size=(200, 5))
    labels = (features[:, 0] + rng.normal(size=200) > 0).astype(int)
    return (
        xgboost.DMatrix(features[:150], label=labels[:150]),
        xgboost.DMatrix(features[150:], label=labels[150:]),
    )


def run(
    session: LocalSession, params: dict[str, Any], interrupt_at: int | None = None, **options: Any
) -> tuple[Any, InterruptAt]:
    rows, evaluated = data()
    interrupt = InterruptAt(interrupt_at)
    arguments: dict[str, Any] = {
        "evals": [(evaluated, "test")],
        "rounds_per_segment": 5,
        "verbose_eval": False,
    }
    with use_session(session):
        model = train(
            {"objective": "binary:logistic", "max_depth": 3, **params},
            rows,
            ROUNDS,
            callbacks=[interrupt, *options.pop("callbacks", ())],
            **(arguments | options),
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
    with pytest.raises(InterruptedTrainingError):
        run(session, params, at_round, **options)
    session = next_round(session)
    model, again = run(session, params, **options)
    assert again.rounds[0] == at_round // 5 * 5, "only the rounds of one segment are repeated"
    return model, session


@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("at_round", [6, 10])
def test_an_interruption_does_not_change_the_model(params: dict[str, Any], at_round: int) -> None:
    calm_session = LocalSession("calm")
    calm, _ = run(calm_session, params)
    model, session = interrupted(params, at_round)
    assert model.save_raw() == calm.save_raw()
    assert session.metrics == calm_session.metrics


def test_without_sampling_the_model_is_that_of_the_library() -> None:
    rows, _ = data()
    params = {"objective": "binary:logistic", "max_depth": 3}
    model, _ = run(LocalSession("run"), params)
    expected = xgboost.train(params, rows, ROUNDS)
    assert model.get_dump() == expected.get_dump()


def test_segments_draw_different_samples() -> None:
    """With one seed in all segments, the same rows would be drawn in each."""
    model, _ = run(LocalSession("run"), {"subsample": 0.3, "max_depth": 1, "eta": 0.0001})
    trees = model.get_dump()
    assert trees[0:5] != trees[5:10]


def test_early_stopping_continues_after_an_interruption() -> None:
    options = {"early_stopping_rounds": 4}
    params = {"eta": 2.0, "max_depth": 6}
    calm, seen = run(LocalSession("calm"), params, **options)
    stopped_at = calm.num_boosted_rounds()
    assert stopped_at < ROUNDS, "else the test shows nothing"
    model, session = interrupted(params, stopped_at - 1, **options)
    assert model.save_raw() == calm.save_raw()
    assert model.best_iteration == calm.best_iteration == stopped_at - 5
    assert seen.rounds == list(range(stopped_at))
    again, none_seen = run(next_round(session), params, **options)
    assert (none_seen.rounds, again.num_boosted_rounds()) == ([], stopped_at), "it has ended"


def test_evaluation_results_are_those_of_the_whole_run() -> None:
    calm: dict[str, Any] = {}
    run(LocalSession("calm"), {}, evals_result=calm)
    results: dict[str, Any] = {}
    interrupted({}, 6, evals_result=results)
    assert results == calm
    assert len(results["test"]["logloss"]) == ROUNDS


def test_every_round_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    session = LocalSession("run")
    reported: list[dict[str, Any]] = []
    record = session.report_metrics

    def report_metrics(metrics: dict[str, Any], dir_name: str | None = None) -> None:
        reported.append(metrics)
        record(metrics, dir_name)

    monkeypatch.setattr(session, "report_metrics", report_metrics)
    results: dict[str, Any] = {}
    reporter = RayTrainReportCallback(metrics={"loss": "test-logloss"})
    run(session, {}, evals_result=results, callbacks=[reporter])
    assert [one["loss"] for one in reported] == results["test"]["logloss"]
    assert len(reported) == ROUNDS


def test_training_from_a_model_adds_rounds_to_it() -> None:
    first, _ = run(LocalSession("first"), {})
    calm, seen = run(LocalSession("calm"), {}, xgb_model=first)
    assert calm.num_boosted_rounds() == 2 * ROUNDS
    assert seen.rounds == list(range(ROUNDS)), "as in XGBoost"


@pytest.mark.parametrize("last", [3, 4], ids=["within a segment", "last of a segment"])
def test_a_callback_ends_the_training(last: int) -> None:
    class StopAfter(xgboost.callback.TrainingCallback):  # type: ignore[misc, name-defined]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            return epoch == last

    session = LocalSession("run")
    model, _ = run(session, {}, callbacks=[StopAfter()])
    assert model.num_boosted_rounds() == last + 1
    _, none_seen = run(next_round(session), {}, callbacks=[StopAfter()])
    assert none_seen.rounds == [], "it has ended"


def test_a_learning_rate_scheduler_sees_the_rounds_of_the_run() -> None:
    def rate(epoch: int) -> float:
        return float(0.5**epoch)

    def options() -> dict[str, Any]:
        return {"callbacks": [xgboost.callback.LearningRateScheduler(rate)]}

    rows, _ = data()
    params = {"objective": "binary:logistic", "max_depth": 3}
    model, _ = run(LocalSession("run"), params, **options())
    expected = xgboost.train(params, rows, ROUNDS, **options())
    assert model.get_dump() == expected.get_dump()


def test_a_learning_rate_scheduler_does_not_see_the_rounds_of_an_initial_model() -> None:
    rates = [0.5**number for number in range(ROUNDS)]
    rows, _ = data()
    params = {"objective": "binary:logistic", "max_depth": 3}
    first = xgboost.train(params, rows, 3)

    def options() -> dict[str, Any]:
        schedule = xgboost.callback.LearningRateScheduler(rates)
        return {"callbacks": [schedule], "xgb_model": first}

    model, _ = run(LocalSession("run"), params, **options())
    expected = xgboost.train(params, rows, ROUNDS, **options())
    assert model.get_dump() == expected.get_dump()


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"booster": "gblinear"}, {}, "gblinear"),
        ({}, {"rounds_per_segment": 0}, "at least 1"),
        ({}, {"callbacks": [RayTrainReportCallback(frequency=2)]}, "rounds_per_segment"),
        (
            {},
            {"callbacks": [xgboost.callback.EarlyStopping(rounds=2, save_best=True)]},
            "save_best",
        ),
    ],
)
def test_what_cannot_be_continued_is_rejected(
    params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(LocalSession("run"), params, **options)


def test_a_second_training_in_one_function_is_rejected() -> None:
    session = LocalSession("run")
    run(session, {})
    with pytest.raises(ConfigError, match="called before in this training function"):
        run(session, {"max_depth": 5})


def test_parameters_as_pairs_are_rejected() -> None:
    rows, _ = data()
    with (
        use_session(LocalSession("run")),
        pytest.raises(ConfigError, match="must be a dictionary, not a list"),
    ):
        train([("eta", 1)], rows)  # type: ignore[arg-type]  # the mistake
