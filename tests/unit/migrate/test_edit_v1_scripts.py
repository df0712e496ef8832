"""Scripts and notebooks with the names of Ray AIR: predictors, and trainers that Ray removed."""

from __future__ import annotations

import json

import pytest

from spotfit.migrate.notebook import rewrite_notebook
from tests.unit.migrate.before_and_after import dedent_script, manual_work, migrated_text

BATCH_PREDICTION = """
    import pandas as pd
    import torch
    from ray.air import Checkpoint
    from ray.train.batch_predictor import BatchPredictor
    from ray.train.torch import TorchCheckpoint, TorchPredictor, TorchTrainer


    class TwoScores(TorchPredictor):
        def call_model(self, inputs):
            scores = super().call_model(inputs)
            return {"first": scores[:, 0], "second": scores[:, 1]}


    def score(checkpoint: TorchCheckpoint):
        predictor = BatchPredictor.from_checkpoint(
            checkpoint, TwoScores, model=torch.nn.Linear(4, 2)
        )
        frame = pd.read_parquet("flowers.parquet")
        return predictor.predict(frame, batch_size=64, max_scoring_workers=2).to_pandas()
"""


def test_a_script_of_batch_prediction_is_migrated() -> None:
    expected = dedent_script(BATCH_PREDICTION)
    for old, new in {
        "from ray.air import": "from spotfit import",
        "from ray.train.batch_predictor import": "from spotfit.prediction import",
        "from ray.train.torch import TorchCheckpoint, TorchPredictor, TorchTrainer": (
            "from spotfit.torch import TorchCheckpoint, TorchTrainer\n"
            "from spotfit.prediction import TorchPredictor"
        ),
    }.items():
        expected = expected.replace(old, new)
    assert migrated_text(BATCH_PREDICTION) == expected
    assert manual_work(BATCH_PREDICTION) == ["16: BatchPredictor"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.train.lightgbm", "LightGBMPredictor"),
        ("ray.train.predictor", "Predictor"),
        ("ray.train.sklearn", "SklearnPredictor"),
        ("ray.train.tensorflow", "TensorflowPredictor"),
        ("ray.train.torch", "TorchPredictor"),
        ("ray.train.torch.torch_predictor", "TorchPredictor"),
        ("ray.train.xgboost", "XGBoostPredictor"),
    ],
)
def test_a_predictor_is_migrated_in_each_form_of_import(module: str, name: str) -> None:
    call = f"{name}.from_checkpoint(checkpoint)\n"
    assert (
        migrated_text(f"from {module} import {name}\n{call}")
        == f"from spotfit.prediction import {name}\n{call}"
    )
    for script in (f"import {module}\n{module}.{call}", f"import {module} as lib\nlib.{call}"):
        first, *_, last = migrated_text(script).splitlines()
        assert (first[:14], f"{last}\n") in [
            ("import spotfit", f"spotfit.prediction.{call}"),
            ("import spotfit", f"lib.prediction.{call}"),
        ]
    assert manual_work(f"from {module} import {name}\n{call}") == []


def test_a_trainer_with_a_predictor_of_its_module_is_migrated() -> None:
    script = """
        from ray.air import RunConfig, ScalingConfig
        from ray.train.xgboost import XGBoostPredictor, XGBoostTrainer

        trainer = XGBoostTrainer(
            label_column="target",
            params={"objective": "binary:logistic"},
            datasets={"train": load_frame},
            num_boost_round=20,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="boosted"),
        )
        predictor = XGBoostPredictor.from_checkpoint(trainer.fit().checkpoint)
    """
    expected = dedent_script(script)
    expected = expected.replace("from ray.air", "from spotfit").replace(
        "from ray.train.xgboost import XGBoostPredictor, XGBoostTrainer",
        "from spotfit.prediction import XGBoostPredictor\n"
        "from spotfit.xgboost import XGBoostTrainer",
    )
    assert migrated_text(script) == expected
    assert manual_work(script) == []


def test_a_script_of_lightning_trainer_keeps_what_must_be_written_again() -> None:
    script = """
        from ray.air.config import RunConfig, ScalingConfig
        from ray.train.lightning import LightningConfigBuilder, LightningTrainer

        config = LightningConfigBuilder().module(cls=Digits, lr=0.1).trainer(max_epochs=3).build()
        LightningTrainer(
            lightning_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="digits"),
        ).fit()
    """
    text = migrated_text(script)
    assert "from spotfit import RunConfig, ScalingConfig" in text
    assert "from spotfit.lightning import LightningTrainer" in text
    assert "from ray.train.lightning import LightningConfigBuilder" in text
    assert manual_work(script) == [
        "5: ray.train.lightning.LightningConfigBuilder",
        "6: LightningTrainer(lightning_config=...)",
    ]


def test_a_script_of_transformers_trainer_names_the_renamed_arguments() -> None:
    script = """
        from ray.train.huggingface import TransformersTrainer

        TransformersTrainer(trainer_init_per_worker=make_trainer, trainer_init_config={"lr": 0.1})
    """
    assert migrated_text(script) == dedent_script(script).replace("ray.train.", "spotfit.")
    assert manual_work(script) == [
        "4: TransformersTrainer(trainer_init_config=...)",
        "4: TransformersTrainer(trainer_init_per_worker=...)",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from ray.train.huggingface import HuggingFaceTrainer\nHuggingFaceTrainer(make)\n",
            "from spotfit.huggingface import TransformersTrainer as HuggingFaceTrainer\n"
            "HuggingFaceTrainer(make)\n",
        ),
        (
            "from ray.train.huggingface import HuggingFaceTrainer as Trainer\nTrainer(make)\n",
            "from spotfit.huggingface import TransformersTrainer as Trainer\nTrainer(make)\n",
        ),
        (
            "import ray.train.huggingface as hf\nhf.HuggingFaceTrainer(make)\n",
            "import spotfit.huggingface as hf\nhf.TransformersTrainer(make)\n",
        ),
        (
            "from ray import train\ntrain.huggingface.HuggingFaceTrainer(make)\n",
            "import spotfit as train\ntrain.huggingface.TransformersTrainer(make)\n",
        ),
    ],
)
def test_an_earlier_name_of_a_trainer_is_replaced(before: str, after: str) -> None:
    assert migrated_text(before) == after
    assert manual_work(before) == []
    assert migrated_text(after) == after


def test_arguments_of_an_earlier_name_of_a_trainer_are_named() -> None:
    script = """
        from ray.train.huggingface import HuggingFaceTrainer
        HuggingFaceTrainer(trainer_init_config={})
    """
    assert manual_work(script) == ["3: TransformersTrainer(trainer_init_config=...)"]


def test_a_script_of_horovod_trainer_is_migrated() -> None:
    script = """
        import horovod.torch as hvd
        from ray.air import ScalingConfig, session
        from ray.train.horovod import HorovodConfig, HorovodTrainer


        def train(config):
            hvd.init()
            session.report({"rank": hvd.rank()})


        HorovodTrainer(
            train, horovod_config=HorovodConfig(), scaling_config=ScalingConfig(num_workers=2)
        ).fit()
    """
    expected = dedent_script(script)
    for old, new in {
        "import horovod.torch as hvd": "import spotfit.horovod.torch as hvd",
        "from ray.air import ScalingConfig, session": (
            "import spotfit as session\nfrom spotfit import ScalingConfig"
        ),
        "from ray.train.horovod": "from spotfit.horovod",
    }.items():
        expected = expected.replace(old, new)
    assert migrated_text(script) == expected
    assert manual_work(script) == []


def test_a_notebook_of_batch_prediction_is_migrated() -> None:
    codes = [
        "%pip install 'ray[air]' xgboost",
        "import ray\nfrom ray.train.batch_predictor import BatchPredictor\nray.init()",
        "from ray.train import xgboost as trained",
        "predictor = BatchPredictor.from_checkpoint(checkpoint, trained.XGBoostPredictor)\n"
        "predictor.predict(frame).to_pandas().head()",
    ]
    cells: list[dict[str, object]] = [
        {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": one}
        for one in codes
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    moved = rewrite_notebook(json.dumps(notebook).encode())
    assert [cell["source"] for cell in json.loads(moved.text)["cells"]] == [
        codes[0],
        "from spotfit.prediction import BatchPredictor",
        "from spotfit import xgboost as trained\nimport spotfit",
        codes[3].replace("trained.XGBoost", "spotfit.prediction.XGBoost"),
    ]
    assert [(note.location, note.what) for note in moved.manual_notes] == [
        ("code cell 4, line 1", "BatchPredictor")
    ]
    assert rewrite_notebook(moved.text).text == moved.text
