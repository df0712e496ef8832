"""The autoscale formula language of Azure Batch pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spotfit_localsim.clouds.azure_autoscale import FormulaError, evaluate

DOCUMENTED_FORMULA = """
startingNumberOfVMs = 1;
maxNumberofVMs = 25;
pendingTaskSamplePercent = $PendingTasks.GetSamplePercent(180 * TimeInterval_Second);
pendingTaskSamples = pendingTaskSamplePercent < 70 ? startingNumberOfVMs
    : avg($PendingTasks.GetSample(180 * TimeInterval_Second));
$TargetDedicatedNodes=min(maxNumberofVMs, pendingTaskSamples);
$NodeDeallocationOption = taskcompletion;
"""


def value(text: str, samples: Sequence[float] = ()) -> Any:
    return evaluate(f"x = {text};", {"$PendingTasks": samples})["x"]


@pytest.mark.parametrize(
    ("samples", "target"),
    [([], 1), ([9, 9], 1), ([9, 9, 9, 0, 0, 0], 4.5), ([99] * 6, 25), ([99, *[2] * 6], 2)],
)
def test_documented_formula_gives_the_documented_target(
    samples: Sequence[float], target: float
) -> None:
    variables = evaluate(DOCUMENTED_FORMULA, {"$PendingTasks": samples})
    assert variables["$TargetDedicatedNodes"] == target
    assert variables["$NodeDeallocationOption"] == "taskcompletion"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1 + 2 * 3 - 4 / 2", 5),
        ("(1 + 2) * 3", 9),
        ("-2 + 3", 1),
        ("2 >= 2", 1),
        ("2 != 2", 0),
        ("1 < 0 ? 10 : 0 < 1 ? 20 : 30", 20),
        ("max(1, $PendingTasks.GetSample(2), 3)", 5),
        ("min($PendingTasks.GetSample(TimeInterval_Minute))", 4),
        ("sum($PendingTasks.GetSample(TimeInterval_Minute * 5))", 12),
        ("len($PendingTasks.GetSample(99))", 3),
        ("$PendingTasks.Count()", 3),
        ("$PendingTasks.GetSamplePercent(2 * TimeInterval_Minute)", 75),
    ],
)
def test_expression_is_evaluated(text: str, result: float) -> None:
    assert value(text, [3, 4, 5]) == result


def test_branch_that_is_not_taken_is_not_evaluated() -> None:
    """Formulas check for samples in the condition before a branch reads them."""
    assert value("$PendingTasks.Count() < 1 ? 7 : max($PendingTasks.GetSample(1))") == 7


@pytest.mark.parametrize(
    "formula",
    [
        "5",
        "x = ",
        "x = 1 +",
        "x = (1",
        "x = 1 2",
        "x = y",
        "x = max()",
        "x = sqrt(2)",
        "x = 1 ? 2",
        "x = $PendingTasks.GetSample()",
        "x = $PendingTasks.Yes(1)",
        "x = 'text'",
    ],
)
def test_invalid_formula_is_rejected(formula: str) -> None:
    with pytest.raises(FormulaError):
        evaluate(formula, {"$PendingTasks": [1.0]})
