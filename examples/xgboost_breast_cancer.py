"""Four workers on two nodes train one XGBoost model, which resumes exactly after an interruption.

Each worker reads its own rows; XGBoost adds up the histograms of all. For a cloud, name its
provisioner and set `storage_path` to a bucket.
"""

import tempfile

import spotfit
from spotfit.xgboost import RayTrainReportCallback, XGBoostTrainer


def train() -> None:
    """Run on every worker; XGBoost's communicator is initialized already."""
    from sklearn.datasets import load_breast_cancer
    from xgboost import DMatrix

    from spotfit.xgboost import train as train_in_segments

    features, labels = load_breast_cancer(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), None, context.get_world_size())
    rows = DMatrix(features[part], label=labels[part])
    params = {"objective": "binary:logistic", "eval_metric": "error", "subsample": 0.8}
    # Saves the model every five rounds, and continues from the latest one.
    train_in_segments(
        params, rows, 30, evals=[(rows, "train")], rounds_per_segment=5, verbose_eval=False
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = XGBoostTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="xgboost", storage_path=storage),
            provisioner="local?nodes=2",
        )
        result = trainer.fit()
        assert result.checkpoint is not None
        assert result.metrics is not None
        model = RayTrainReportCallback.get_model(result.checkpoint)
        error = result.metrics["train-error"]
        print(f"{model.num_boosted_rounds()} rounds, training error below 2 %: {error < 0.02}")
