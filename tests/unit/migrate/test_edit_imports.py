"""Every form of import statement and its replacement."""

from __future__ import annotations

import pytest

from tests.unit.migrate.before_and_after import dedent_script, manual_work, migrated_text


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
        ("from ray.train.lightning import RayDDPStrategy", "from spotfit.lightning import RayDDPStrategy"),  # noqa: E501
        ("from ray.train import *", "from spotfit import *"),
        ("from ray.train.torch import *", "from spotfit.torch import *"),
        ("from ray.air import session", "import spotfit as session"),
        ("from ray.air import RunConfig, session", "import spotfit as session\nfrom spotfit import RunConfig"),  # noqa: E501
    ],
)  # fmt: skip
def test_an_import_is_rewritten(before: str, after: str) -> None:
    assert migrated_text(f"{before}\n") == f"{after}\n"


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
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
def test_names_are_found_in_internal_modules_of_ray(
    module: str, name: str, replacement: str
) -> None:
    assert migrated_text(f"from {module} import {name}\n") == f"from {replacement} import {name}\n"


def test_names_of_one_statement_are_split_by_module() -> None:
    script = dedent_script("""
        from ray import train, tune
        from ray.train import TrainingIterator, Checkpoint, RunConfig
        tune.Tuner, TrainingIterator
    """)
    assert migrated_text(script) == dedent_script("""
        import spotfit as train
        from ray import tune
        from ray.train import TrainingIterator
        from spotfit import Checkpoint, RunConfig
        tune.Tuner, TrainingIterator
    """)
    assert manual_work(script) == ["4: ray.train.TrainingIterator", "4: ray.tune.Tuner"]


def test_parentheses_and_their_comments_are_preserved() -> None:
    assert migrated_text("""
        from ray.train import (  # the configuration
            Checkpoint,  # of files
            RunConfig,
        )
    """) == dedent_script("""
        from spotfit import (  # the configuration
            Checkpoint,  # of files
            RunConfig,
        )
    """)


def test_parentheses_are_preserved_in_split_imports() -> None:
    assert migrated_text("""
        from ray.train import (
            Checkpoint,
            TrainingIterator,
            RunConfig,
        )
        TrainingIterator()
    """) == dedent_script("""
        from spotfit import (
            Checkpoint,
            RunConfig,
        )
        from ray.train import (
            TrainingIterator,
        )
        TrainingIterator()
    """)


def test_import_ray_is_removed_if_only_train_was_used() -> None:
    assert migrated_text("""
        import ray
        import torch
        from ray.train.torch import TorchTrainer

        ray.train.report({})
    """) == dedent_script("""
        import spotfit
        import torch
        from spotfit.torch import TorchTrainer

        spotfit.report({})
    """)


def test_import_ray_remains_if_other_names_are_used() -> None:
    assert migrated_text("""
        import ray
        import ray.train

        ray.train.report({})
        ray.get(0)
    """) == dedent_script("""
        import ray
        import spotfit

        spotfit.report({})
        ray.get(0)
    """)


def test_import_ray_is_added_if_ray_train_had_bound_it() -> None:
    assert migrated_text("""
        import ray.train
        ray.train.report({})
        ray.get(0)
    """) == dedent_script("""
        import spotfit
        import ray
        spotfit.report({})
        ray.get(0)
    """)


def test_an_import_in_a_function_is_rewritten_in_place() -> None:
    assert migrated_text("""
        def train(config):
            import ray.train.torch
            from ray.train import report

            report({"device": ray.train.torch.get_device()})


        def other():
            import ray

            return ray.get(ray.put(1))
    """) == dedent_script("""
        def train(config):
            import spotfit.torch
            from spotfit import report

            report({"device": spotfit.torch.get_device()})


        def other():
            import ray

            return ray.get(ray.put(1))
    """)


def test_a_type_checking_import_adds_no_runtime_import() -> None:
    assert migrated_text("""
        from typing import TYPE_CHECKING
        import ray
        if TYPE_CHECKING:
            import ray.train
            from ray.train import Checkpoint

        def load(checkpoint: "Checkpoint") -> "ray.train.Checkpoint":
            return ray.train.get_checkpoint()
    """) == dedent_script("""
        from typing import TYPE_CHECKING
        import spotfit
        if TYPE_CHECKING:
            import spotfit
            from spotfit import Checkpoint

        def load(checkpoint: "Checkpoint") -> "spotfit.Checkpoint":
            return spotfit.get_checkpoint()
    """)


def test_an_import_in_try_except() -> None:
    assert migrated_text("""
        try:
            import ray
            from ray import train
        except ImportError:
            ray = None
            train = None
        if ray is not None:
            ray.train.report({})
        train.report({})
    """) == dedent_script("""
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


def test_an_internal_module_of_ray_is_replaced() -> None:
    assert migrated_text("""
        from ray.train.v2.api import config
        import ray.train.torch.config as torch_config
        run = config.RunConfig(), torch_config.TorchConfig()
    """) == dedent_script("""
        import spotfit
        import spotfit
        run = spotfit.RunConfig(), spotfit.torch.TorchConfig()
    """).replace("import spotfit\nimport spotfit\n", "import spotfit\n")


def test_several_statements_on_a_line() -> None:
    assert migrated_text("import os; import ray.train as t; t.report({})\n") == (
        "import os; import spotfit as t; t.report({})\n"
    )
    assert migrated_text("import ray; x = 1\nray.train.report({})\n") == (
        "import spotfit; x = 1\nspotfit.report({})\n"
    )
    assert migrated_text("if True: import ray; ray.init()\n") == "if True: pass\n"


def test_an_existing_name_spotfit_is_not_overwritten() -> None:
    assert migrated_text("""
        import ray.train
        from elsewhere import spotfit
        ray.train.report({"fit": spotfit(3)})
    """) == dedent_script("""
        import spotfit as _spotfit
        from elsewhere import spotfit
        _spotfit.report({"fit": spotfit(3)})
    """)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("from ray.train.mosaic import MosaicConfig", "ray.train.mosaic.MosaicConfig"),
        ("import horovod.tensorflow as hvd", "horovod.tensorflow"),
        ("from ray import *", "from ray import *"),
        ("import ray.tune", "ray.tune"),
        ("from ray.train._internal.session import get_session", "ray.train._internal.session.get_session"),  # noqa: E501
        ("from ray.train.nothing import of_the_kind", "ray.train.nothing.of_the_kind"),
    ],
)  # fmt: skip
def test_names_without_counterpart_remain_and_are_reported(statement: str, what: str) -> None:
    assert migrated_text(f"{statement}\n") == f"{statement}\n"
    assert manual_work(f"{statement}\n") == [f"1: {what}"]


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
def test_a_script_without_ray_is_unchanged(script: str) -> None:
    assert migrated_text(script) == script
    assert manual_work(script) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "import horovod.torch as hvd\nhvd.init()\n",
            "import spotfit.horovod.torch as hvd\nhvd.init()\n",
        ),
        (
            "from horovod.torch.elastic.state import TorchState\nTorchState()\n",
            "from spotfit.horovod.torch.elastic import TorchState\nTorchState()\n",
        ),
        (
            "import horovod.torch\nhorovod.torch.init()\n",
            "import spotfit.horovod.torch\nspotfit.horovod.torch.init()\n",
        ),
        (
            "from ray.train.horovod import HorovodTrainer\nHorovodTrainer(print)\n",
            "from spotfit.horovod import HorovodTrainer\nHorovodTrainer(print)\n",
        ),
    ],
)
def test_names_of_horovod_are_migrated(script: str, expected: str) -> None:
    assert migrated_text(script) == expected
    assert manual_work(script) == []


def test_starting_horovod_remains_and_is_reported() -> None:
    script = "import horovod\nimport horovod.torch as hvd\nhvd.init()\nhorovod.run(print)\n"
    assert migrated_text(script) == script.replace("horovod.torch", "spotfit.horovod.torch")
    assert manual_work(script) == ["4: horovod.run"]
