"""Four workers on two nodes train one LightGBM model, which resumes exactly after an interruption.

Each worker reads its own rows of the training set, and all evaluate the same rows. For a cloud,
name its provisioner and set `storage_path` to a bucket.
"""

import tempfile

import spotfit
from spotfit.lightgbm import LightGBMTrainer, RayTrainReportCallback


def train() -> None:
    """Run on every worker; the network parameters are added to params by `train_in_segments`."""
    from lightgbm import Dataset
    from sklearn.datasets import load_breast_cancer

    from spotfit.lightgbm import train as train_in_segments

    features, labels = load_breast_cancer(return_X_y=True)
    context = spotfit.get_context()
    part = slice(context.get_world_rank(), 400, context.get_world_size())
    rows = Dataset(features[part], label=labels[part])
    evaluated = Dataset(features[400:], label=labels[400:], reference=rows)
    params = {
        "objective": "binary",
        "metric": "auc",
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "verbosity": -1,
    }
    # Saves the model every five rounds, and continues from the latest one.
    train_in_segments(
        params, rows, 30, valid_sets=[evaluated], valid_names=["test"], rounds_per_segment=5
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = LightGBMTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="lightgbm", storage_path=storage),
            provisioner="local?nodes=2",
        )
        result = trainer.fit()
        assert result.checkpoint is not None
        assert result.metrics is not None
        model = RayTrainReportCallback.get_model(result.checkpoint)
        auc = result.metrics["test-auc"]
        print(f"{model.current_iteration()} rounds, test AUC above 0.95: {auc > 0.95}")
