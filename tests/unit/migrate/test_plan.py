"""What is dropped, what stays, and what is told about it."""

from __future__ import annotations

import pytest

from spotfit.host import env
from tests.unit.migrate.before_and_after import left, move, moved, text


def test_the_cluster_goes_where_nothing_else_needs_it() -> None:
    assert moved("""
        import ray
        from ray.train.torch import TorchTrainer

        ray.init(num_cpus=4)
        TorchTrainer(print).fit()
        ray.shutdown()
    """) == text("""
        from spotfit.torch import TorchTrainer

        TorchTrainer(print).fit()
    """)


def test_a_dropped_line_is_told_and_leaves_nothing_to_do() -> None:
    moved = move("import ray\nray.init()\n")
    assert [(note.line, note.what, note.by_hand) for note in moved.notes] == [
        (2, "ray.init()", False)
    ]


def test_an_environment_of_a_dropped_cluster_is_left_to_a_hand() -> None:
    script = "import ray\nray.init(runtime_env={'env_vars': {'A': '1'}})\n"
    assert moved(script).strip() == ""
    assert left(script) == ["2: ray.init()"]
    assert "worker_runtime_env" in move(script).left[0].do


@pytest.mark.parametrize(
    "start",
    [
        "if not ray.is_initialized():\n    ray.init()\n",
        "if not ray.is_initialized(): ray.init(num_cpus=2)\n",
        "if ray.is_initialized():\n    ray.shutdown()\n    ray.init()\n",
    ],
)
def test_a_cluster_that_is_started_once_goes(start: str) -> None:
    assert moved(f"import ray\n{start}print(1)\n") == "print(1)\n"


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
def test_the_cluster_stays_where_something_needs_it(need: str) -> None:
    script = f"import ray\nray.init()\n{need}\n"
    assert moved(script) == script


@pytest.mark.parametrize(
    "other", ["import ray.data", "from ray import tune", "from ray.train.xgboost import *"]
)
def test_the_cluster_stays_for_another_part_of_ray(other: str) -> None:
    script = f"import ray\n{other}\nray.init()\n"
    assert moved(script) == script


def test_a_block_that_only_started_the_cluster_passes() -> None:
    assert moved("""
        from ray import init, shutdown
        def main():
            # locally
            init()
        try:
            train()
        finally:
            shutdown()
    """) == text("""
        def main():
            # locally
            pass
        try:
            train()
        finally:
            pass
    """)


def test_data_tasks_and_tune_are_told_with_their_lines() -> None:
    script = text("""
        import ray
        from ray import tune

        @ray.remote
        def load():
            return ray.data.read_csv("x")

        tune.Tuner(load)
        ray.get(load.remote())
    """)
    assert moved(script) == script
    assert left(script) == [
        "5: ray.remote",
        "7: ray.data.read_csv",
        "9: ray.tune.Tuner",
        "10: ray.get",
    ]
    assert all(note.do for note in move(script).left)


def test_what_a_moved_module_does_not_have_is_told() -> None:
    script = text("""
        from ray import train
        train.no_such_name
        train.lightning.prepare_trainer(None)
        train.report({})
    """)
    assert moved(script) == script.replace("from ray import train", "import spotfit as train")
    assert left(script) == [
        "3: ray.train.no_such_name",
        "4: ray.train.lightning.prepare_trainer",
    ]


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        (
            "from ray.train.tensorflow import TensorflowTrainer as T",
            "ray.train.tensorflow.TensorflowTrainer",
        ),
        ("import ray.train.xgboost as x\nT = x.XGBoostTrainer", "ray.train.xgboost.XGBoostTrainer"),
        ("import ray\nT = ray.train.v2.jax.JaxTrainer", "ray.train.v2.jax.JaxTrainer"),
        ("from ray.train.base_trainer import BaseTrainer", "ray.train.base_trainer.BaseTrainer"),
    ],
)
def test_a_script_whose_trainer_stays_with_ray_stays_whole(trainer: str, told: str) -> None:
    script = (
        f"{trainer}\nfrom ray.train import ScalingConfig\nprint(ScalingConfig(num_workers=2))\n"
    )
    assert moved(script) == script
    assert [line.partition(": ")[2] for line in left(script)] == [told]


def test_a_trainer_with_datasets_is_told() -> None:
    script = text("""
        from ray.train.torch import TorchTrainer
        TorchTrainer(print, datasets={}, dataset_config=None)
    """)
    assert left(script) == ["3: TorchTrainer(datasets=...)"]


def test_the_old_session_becomes_the_context() -> None:
    assert moved("""
        from ray import air
        from ray.air import session

        session.report({"rank": session.get_world_rank()}, checkpoint=session.get_checkpoint())
        air.session.get_local_rank(), air.ScalingConfig()
    """) == text("""
        import spotfit as air
        import spotfit as session

        session.report({"rank": session.get_context().get_world_rank()}, checkpoint=session.get_checkpoint())
        air.get_context().get_local_rank(), air.ScalingConfig()
    """)  # noqa: E501
    assert left("from ray.air import session\nsession.get_trial_name()\n") == [
        "2: ray.air.session.get_trial_name"
    ]


def test_a_variable_is_renamed_where_we_have_it() -> None:
    assert moved("import os\nos.environ['RAY_TRAIN_COLLECTIVE_TIMEOUT_S'] = '60'\n") == (
        f"import os\nos.environ['{env.COLLECTIVE_TIMEOUT_S.name}'] = '60'\n"
    )


def test_a_variable_that_we_do_not_have_is_told() -> None:
    script = text("""
        env = {"RAY_TRAIN_NO_SUCH_THING": "1", "PATH": "export RAY_CHDIR_TO_TRIAL_DIR=0"}
    """)
    assert moved(script) == script
    assert left(script) == ["2: RAY_CHDIR_TO_TRIAL_DIR", "2: RAY_TRAIN_NO_SUCH_THING"]


def test_a_text_that_names_a_module_is_told() -> None:
    script = "mock.patch('ray.train.report', print)\nlog('ray.train is fine')\n"
    assert moved(script) == script
    assert left(script) == ["1: 'ray.train.report'"]
    assert "spotfit.report" in move(script).left[0].do
