"""Which code is removed, kept and reported."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from typing import Any

import pytest

import spotfit
import spotfit.huggingface
import spotfit.lightning
import spotfit.tensorflow
import spotfit.torch
from spotfit.core.errors import ConfigTypeError, SpotfitError
from spotfit.core.unsupported_names import UNSUPPORTED_ARGUMENTS
from spotfit.host import env
from spotfit.migrate.name_map import REMOVED_ARGUMENTS, SpotfitName, find_counterpart
from tests.unit.migrate.before_and_after import (
    dedent_script,
    manual_work,
    migrate_script,
    migrated_text,
)


def test_cluster_calls_are_removed_if_ray_is_not_needed() -> None:
    assert migrated_text("""
        import ray
        from ray.train.torch import TorchTrainer

        ray.init(num_cpus=4)
        TorchTrainer(print).fit()
        ray.shutdown()
    """) == dedent_script("""
        from spotfit.torch import TorchTrainer

        TorchTrainer(print).fit()
    """)


def test_a_removed_line_is_reported_without_manual_work() -> None:
    moved = migrate_script("import ray\nray.init()\n")
    assert [(note.line, note.what, note.is_manual) for note in moved.notes] == [
        (2, "ray.init()", False)
    ]


def test_a_removed_runtime_env_is_manual_work() -> None:
    script = "import ray\nray.init(runtime_env={'env_vars': {'A': '1'}})\n"
    assert migrated_text(script).strip() == ""
    assert manual_work(script) == ["2: ray.init()"]
    assert "worker_runtime_env" in migrate_script(script).manual_notes[0].do


def test_a_literal_runtime_env_moves_into_the_run_config() -> None:
    script = """
        import ray
        from ray.train import RunConfig

        ray.init(runtime_env={"env_vars": {"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "60"}})
        config = RunConfig(
            name="a",
        )
    """
    assert migrated_text(script) == dedent_script("""
        from spotfit import RunConfig

        config = RunConfig(
            name="a", worker_runtime_env={"env_vars": {"SPOTFIT_COLLECTIVE_TIMEOUT_S": "60"}},
        )
    """)
    assert manual_work(script) == []


@pytest.mark.parametrize(
    ("environment", "configs"),
    [
        ("{'env_vars': {'A': value}}", "RunConfig()"),
        ("{'conda': 'env.yaml'}", "RunConfig()"),
        ("{'pip': {'packages': ['x']}}", "RunConfig()"),
        ("environment", "RunConfig()"),
        ("{}", "RunConfig(), RunConfig()"),
        ("{}", "RunConfig(worker_runtime_env={})"),
        ("{}", "RunConfig(**options)"),
    ],
)
def test_an_ambiguous_runtime_env_is_manual_work(environment: str, configs: str) -> None:
    script = f"import ray\nfrom ray.train import RunConfig\nray.init(runtime_env={environment})\n"
    assert manual_work(f"{script}{configs}\n") == ["3: ray.init()"]


def test_a_variable_without_effect_is_no_manual_work() -> None:
    moved = migrate_script("import os\nos.environ['RAY_TRAIN_V2_ENABLED'] = '1'\n")
    assert [(note.line, note.what, note.is_manual) for note in moved.notes] == [
        (2, "RAY_TRAIN_V2_ENABLED", False)
    ]


TRAINER_MODULES = {
    "AccelerateTrainer": "ray.train.huggingface",
    "DataParallelTrainer": "ray.train.v2.api.data_parallel_trainer",
    "HorovodTrainer": "ray.train.horovod",
    "TensorflowTrainer": "ray.train.tensorflow",
    "TorchTrainer": "ray.train.torch",
    "TransformersTrainer": "ray.train.huggingface",
}


@pytest.mark.parametrize(
    ("name", "argument", "do"),
    [(name, one, do) for name, removed in REMOVED_ARGUMENTS.items() for one, do in removed.items()],
)
def test_a_removed_argument_is_manual_work(name: str, argument: str, do: str) -> None:
    module = TRAINER_MODULES.get(name, "ray.train")
    (note,) = migrate_script(f"from {module} import {name}\n{name}({argument}={{}})\n").notes
    assert (note.line, note.what, note.is_manual) == (2, f"{name}({argument}=...)", True)
    assert do in note.do
    function = [print] if name.endswith("Trainer") else []
    place = find_counterpart((*module.split("."), name))
    assert isinstance(place, SpotfitName)
    owner = importlib.import_module(place.module)
    with pytest.raises(DeprecationWarning):
        getattr(owner, name)(*function, **{argument: {}})


def arguments_of(kind: type) -> set[str]:
    """Return the names of the arguments, also of those that are passed on to parent classes."""
    own = set(inspect.signature(kind).parameters)
    return own | (arguments_of(kind.__base__ or object) if "options" in own else set())


def test_every_argument_that_raises_a_deprecation_warning_is_listed() -> None:
    refused: dict[str, set[str]] = defaultdict(set)
    for module in (
        *(spotfit, spotfit.horovod, spotfit.huggingface),
        *(spotfit.tensorflow, spotfit.torch),
    ):
        for name in module.__all__:
            if name.endswith(("Config", "Trainer")):
                function = [print] if name.endswith("Trainer") else []
                for argument in arguments_of(getattr(module, name)):
                    try:
                        getattr(module, name)(*function, **{argument: {}})
                    except DeprecationWarning:
                        refused[name].add(argument)
                    except (SpotfitError, TypeError, ValueError):
                        pass  # the argument exists, and has another type
    assert refused == {name: set(removed) for name, removed in REMOVED_ARGUMENTS.items()}


@pytest.mark.parametrize(
    "start",
    [
        "if not ray.is_initialized():\n    ray.init()\n",
        "if not ray.is_initialized(): ray.init(num_cpus=2)\n",
        "if ray.is_initialized():\n    ray.shutdown()\n    ray.init()\n",
    ],
)
def test_a_guarded_cluster_start_is_removed(start: str) -> None:
    assert migrated_text(f"import ray\n{start}print(1)\n") == "print(1)\n"


@pytest.mark.parametrize(
    "need",
    [
        "ray.get(ray.put(1))",
        "print(ray.is_initialized())",
        "context = ray.init()",
        "with ray.init():\n    pass",
        "if not ray.is_initialized():\n    ray.init()\nelse:\n    print()",
    ],
)
def test_cluster_calls_remain_if_ray_is_needed(need: str) -> None:
    script = f"import ray\nray.init()\n{need}\n"
    assert migrated_text(script) == script


@pytest.mark.parametrize(
    "other", ["import ray.serve", "from ray import tune", "from ray.train.mosaic import *"]
)
def test_cluster_calls_remain_for_other_libraries_of_ray(other: str) -> None:
    script = f"import ray\n{other}\nray.init()\n"
    assert migrated_text(script) == script


def test_an_emptied_block_gets_pass() -> None:
    assert migrated_text("""
        from ray import init, shutdown
        def main():
            # locally
            init()
        try:
            train()
        finally:
            shutdown()
    """) == dedent_script("""
        def main():
            # locally
            pass
        try:
            train()
        finally:
            pass
    """)


def test_tasks_serve_and_tune_are_reported_with_their_lines() -> None:
    script = dedent_script("""
        import ray
        from ray import tune

        @ray.remote
        def load():
            return ray.serve.run("x")

        tune.Tuner(load)
        ray.get(load.remote())
    """)
    assert migrated_text(script) == script
    assert manual_work(script) == [
        "5: ray.remote",
        "7: ray.serve.run",
        "9: ray.tune.Tuner",
        "10: ray.get",
    ]
    assert all(note.do for note in migrate_script(script).manual_notes)


def test_a_missing_name_of_a_mapped_module_is_reported() -> None:
    script = dedent_script("""
        from ray import train
        train.no_such_name
        train.mosaic.MosaicConfig(None)
        train.report({})
    """)
    assert migrated_text(script) == script.replace(
        "from ray import train", "import spotfit as train"
    )
    assert manual_work(script) == [
        "3: ray.train.no_such_name",
        "4: ray.train.mosaic.MosaicConfig",
    ]


@pytest.mark.parametrize(
    ("trainer", "reported"),
    [
        (
            "from ray.train.mosaic import MosaicTrainer as T",
            "ray.train.mosaic.MosaicTrainer",
        ),
        (
            "import ray.train.mosaic as x\nT = x.MosaicTrainer",
            "ray.train.mosaic.MosaicTrainer",
        ),
        ("import ray\nT = ray.train.mosaic.MosaicTrainer", "ray.train.mosaic.MosaicTrainer"),
        ("from ray.train.base_trainer import BaseTrainer", "ray.train.base_trainer.BaseTrainer"),
        ("from ray.train.rl import RLTrainer", "ray.train.rl.RLTrainer"),
    ],
)
def test_a_script_with_an_unsupported_trainer_is_unchanged(trainer: str, reported: str) -> None:
    script = (
        f"{trainer}\nfrom ray.train import ScalingConfig\nprint(ScalingConfig(num_workers=2))\n"
    )
    assert migrated_text(script) == script
    assert [line.partition(": ")[2] for line in manual_work(script)] == [reported]


def test_an_unsupported_trainer_is_reported_with_the_way_out() -> None:
    (note,) = migrate_script("from ray.train.mosaic import MosaicTrainer\n").manual_notes
    assert "in the training function of a spotfit.torch.TorchTrainer" in note.do
    assert note.do.endswith("The script was not changed, because spotfit has no such trainer.")


@pytest.mark.parametrize("argument", UNSUPPORTED_ARGUMENTS)
def test_an_argument_of_v1_trainers_is_manual_work_and_a_type_error(argument: str) -> None:
    script = (
        f"from ray.train.lightning import LightningTrainer\nLightningTrainer(print, {argument}=1)\n"
    )
    trainer: Any = spotfit.lightning.LightningTrainer
    (note,) = migrate_script(script).manual_notes
    assert (note.line, note.what) == (2, f"LightningTrainer({argument}=...)")
    assert note.do == UNSUPPORTED_ARGUMENTS[argument]
    with pytest.raises(ConfigTypeError) as raised:
        trainer(print, **{argument: 1})
    assert raised.value.do == UNSUPPORTED_ARGUMENTS[argument]


def test_datasets_are_migrated_by_their_import() -> None:
    script = dedent_script("""
        import ray.data
        from ray.train.torch import TorchTrainer
        TorchTrainer(print, datasets={"train": ray.data.range(8)})
    """)
    assert manual_work(script) == []
    assert "spotfit.data.range(8)" in migrated_text(script)


def test_session_functions_become_context_methods() -> None:
    assert migrated_text("""
        from ray import air
        from ray.air import session

        session.report({"rank": session.get_world_rank()}, checkpoint=session.get_checkpoint())
        air.session.get_local_rank(), air.ScalingConfig()
    """) == dedent_script("""
        import spotfit as air
        import spotfit as session

        session.report({"rank": session.get_context().get_world_rank()}, checkpoint=session.get_checkpoint())
        air.get_context().get_local_rank(), air.ScalingConfig()
    """)  # noqa: E501
    assert manual_work("from ray.air import session\nsession.get_trial_name()\n") == [
        "2: ray.air.session.get_trial_name"
    ]


def test_a_supported_variable_is_renamed() -> None:
    assert migrated_text("import os\nos.environ['RAY_TRAIN_COLLECTIVE_TIMEOUT_S'] = '60'\n") == (
        f"import os\nos.environ['{env.COLLECTIVE_TIMEOUT_S.name}'] = '60'\n"
    )


def test_an_unsupported_variable_is_reported() -> None:
    script = dedent_script("""
        env = {"RAY_TRAIN_NO_SUCH_THING": "1", "PATH": "export RAY_CHDIR_TO_TRIAL_DIR=0"}
    """)
    assert migrated_text(script) == script
    assert manual_work(script) == []
    assert [f"{note.line}: {note.what}" for note in migrate_script(script).notes] == [
        "2: RAY_CHDIR_TO_TRIAL_DIR",
        "2: RAY_TRAIN_NO_SUCH_THING",
    ]


def test_a_string_with_a_module_name_is_reported() -> None:
    script = "mock.patch('ray.train.report', print)\nlog('ray.train is fine')\n"
    assert migrated_text(script) == script
    assert manual_work(script) == ["1: 'ray.train.report'"]
    assert "spotfit.report" in migrate_script(script).manual_notes[0].do
