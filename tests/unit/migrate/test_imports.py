"""Import statements: each way to write one, and what takes its place."""

from __future__ import annotations

import pytest

from tests.unit.migrate.before_and_after import left, moved, text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import ray.train", "import spotfit"),
        ("import ray.train as train", "import spotfit as train"),
        ("import ray.train as rt, os", "import spotfit as rt, os"),
        ("import os, ray.train", "import os, spotfit"),
        ("import ray.train.torch", "import spotfit.torch"),
        ("import ray.train.torch as rtt", "import spotfit.torch as rtt"),
        ("import ray.train.collective as c", "import spotfit.collective as c"),
        ("from ray import train", "import spotfit as train"),
        ("from ray import train as t", "import spotfit as t"),
        ("from ray import train as spotfit", "import spotfit"),
        ("from ray.train import torch", "from spotfit import torch"),
        ("from ray.train import torch as rtt", "from spotfit import torch as rtt"),
        ("from ray.train import collective", "from spotfit import collective"),
        ("from ray.train import RunConfig", "from spotfit import RunConfig"),
        ("from ray.train import RunConfig as R", "from spotfit import RunConfig as R"),
        ("from ray.train.torch import TorchTrainer", "from spotfit.torch import TorchTrainer"),
        ("from ray.train.collective import barrier", "from spotfit.collective import barrier"),
        ("from ray.train import *", "from spotfit import *"),
        ("from ray.train.torch import *", "from spotfit.torch import *"),
        ("from ray.air import session", "import spotfit as session"),
        ("from ray.air import RunConfig, session", "import spotfit as session\nfrom spotfit import RunConfig"),  # noqa: E501
    ],
)  # fmt: skip
def test_an_import_is_moved(before: str, after: str) -> None:
    assert moved(f"{before}\n") == f"{after}\n"


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("ray.air", "ScalingConfig", "spotfit"),
        ("ray.air.config", "RunConfig", "spotfit"),
        ("ray.air.checkpoint", "Checkpoint", "spotfit"),
        ("ray.air.result", "Result", "spotfit"),
        ("ray.train._checkpoint", "Checkpoint", "spotfit"),
        ("ray.train.data_parallel_trainer", "DataParallelTrainer", "spotfit"),
        ("ray.train.error", "SessionMisuseError", "spotfit"),
        ("ray.train.torch.config", "TorchConfig", "spotfit.torch"),
        ("ray.train.torch.torch_trainer", "TorchTrainer", "spotfit.torch"),
        ("ray.train.torch.train_loop_utils", "prepare_model", "spotfit.torch"),
        ("ray.train.v2.api.callback", "UserCallback", "spotfit"),
        ("ray.train.v2.api.config", "FailureConfig", "spotfit"),
        ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer", "spotfit"),
        ("ray.train.v2.api.exceptions", "WorkerGroupError", "spotfit"),
        ("ray.train.v2.torch.torch_trainer", "TorchTrainer", "spotfit.torch"),
    ],
)
def test_a_name_is_found_in_whatever_module_of_ray_it_was_taken_from(
    module: str, name: str, ours: str
) -> None:
    assert moved(f"from {module} import {name}\n") == f"from {ours} import {name}\n"


def test_names_of_one_statement_go_where_each_belongs() -> None:
    script = text("""
        from ray import train, tune
        from ray.train import BatchPredictor, Checkpoint, RunConfig
        tune.Tuner, BatchPredictor
    """)
    assert moved(script) == text("""
        import spotfit as train
        from ray import tune
        from ray.train import BatchPredictor
        from spotfit import Checkpoint, RunConfig
        tune.Tuner, BatchPredictor
    """)
    assert left(script) == ["4: ray.train.BatchPredictor", "4: ray.tune.Tuner"]


def test_brackets_and_their_comments_stay() -> None:
    assert moved("""
        from ray.train import (  # the configuration
            Checkpoint,  # of files
            RunConfig,
        )
    """) == text("""
        from spotfit import (  # the configuration
            Checkpoint,  # of files
            RunConfig,
        )
    """)


def test_brackets_hold_for_those_that_move_and_those_that_stay() -> None:
    assert moved("""
        from ray.train import (
            Checkpoint,
            BatchPredictor,
            RunConfig,
        )
        BatchPredictor()
    """) == text("""
        from spotfit import (
            Checkpoint,
            RunConfig,
        )
        from ray.train import (
            BatchPredictor,
        )
        BatchPredictor()
    """)


def test_ray_itself_goes_when_only_train_was_used() -> None:
    assert moved("""
        import ray
        import torch
        from ray.train.torch import TorchTrainer

        ray.train.report({})
    """) == text("""
        import spotfit
        import torch
        from spotfit.torch import TorchTrainer

        spotfit.report({})
    """)


def test_ray_stays_beside_us_when_other_things_are_used() -> None:
    assert moved("""
        import ray
        import ray.train

        ray.train.report({})
        ray.get(0)
    """) == text("""
        import ray
        import spotfit

        spotfit.report({})
        ray.get(0)
    """)


def test_ray_is_still_imported_where_the_train_package_had_brought_it() -> None:
    assert moved("""
        import ray.train
        ray.train.report({})
        ray.get(0)
    """) == text("""
        import spotfit
        import ray
        spotfit.report({})
        ray.get(0)
    """)


def test_an_import_in_a_function_is_moved_there() -> None:
    assert moved("""
        def train(config):
            import ray.train.torch
            from ray.train import report

            report({"device": ray.train.torch.get_device()})


        def other():
            import ray

            return ray.get(ray.put(1))
    """) == text("""
        def train(config):
            import spotfit.torch
            from spotfit import report

            report({"device": spotfit.torch.get_device()})


        def other():
            import ray

            return ray.get(ray.put(1))
    """)


def test_an_import_for_type_checkers_brings_nothing_at_run_time() -> None:
    assert moved("""
        from typing import TYPE_CHECKING
        import ray
        if TYPE_CHECKING:
            import ray.train
            from ray.train import Checkpoint

        def load(checkpoint: "Checkpoint") -> "ray.train.Checkpoint":
            return ray.train.get_checkpoint()
    """) == text("""
        from typing import TYPE_CHECKING
        import spotfit
        if TYPE_CHECKING:
            import spotfit
            from spotfit import Checkpoint

        def load(checkpoint: "Checkpoint") -> "spotfit.Checkpoint":
            return spotfit.get_checkpoint()
    """)


def test_an_import_that_may_fail() -> None:
    assert moved("""
        try:
            import ray
            from ray import train
        except ImportError:
            ray = None
            train = None
        if ray is not None:
            ray.train.report({})
        train.report({})
    """) == text("""
        try:
            import ray
            import spotfit
            import spotfit as train
        except ImportError:
            ray = None
            train = None
        if ray is not None:
            spotfit.report({})
        train.report({})
    """)


def test_a_module_that_ray_keeps_its_code_in_dissolves() -> None:
    assert moved("""
        from ray.train.v2.api import config
        import ray.train.torch.config as torch_config
        run = config.RunConfig(), torch_config.TorchConfig()
    """) == text("""
        import spotfit
        import spotfit
        run = spotfit.RunConfig(), spotfit.torch.TorchConfig()
    """).replace("import spotfit\nimport spotfit\n", "import spotfit\n")


def test_several_statements_on_a_line() -> None:
    assert moved("import os; import ray.train as t; t.report({})\n") == (
        "import os; import spotfit as t; t.report({})\n"
    )
    assert moved("import ray; x = 1\nray.train.report({})\n") == (
        "import spotfit; x = 1\nspotfit.report({})\n"
    )
    assert moved("if True: import ray; ray.init()\n") == "if True: pass\n"


def test_our_name_is_not_taken_from_the_script() -> None:
    assert moved("""
        import ray.train
        from elsewhere import spotfit
        ray.train.report({"fit": spotfit(3)})
    """) == text("""
        import spotfit as _spotfit
        from elsewhere import spotfit
        _spotfit.report({"fit": spotfit(3)})
    """)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("from ray.train.lightning import RayTrainReportCallback", "ray.train.lightning.RayTrainReportCallback"),  # noqa: E501
        ("from ray import *", "from ray import *"),
        ("import ray.data", "ray.data"),
        ("from ray.train._internal.session import get_session", "ray.train._internal.session.get_session"),  # noqa: E501
        ("from ray.train.nothing import of_the_kind", "ray.train.nothing.of_the_kind"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_stays_and_is_told(statement: str, what: str) -> None:
    assert moved(f"{statement}\n") == f"{statement}\n"
    assert left(f"{statement}\n") == [f"1: {what}"]


@pytest.mark.parametrize(
    "script",
    [
        "import torch\n",
        "import rayon\nfrom sunray import train\n",
        "from . import ray\nfrom .ray import train\n",
        "import spotfit\nspotfit.report({})\n",
        "",
    ],
)
def test_a_script_without_ray_stays_as_it_is(script: str) -> None:
    assert moved(script) == script
    assert left(script) == []
