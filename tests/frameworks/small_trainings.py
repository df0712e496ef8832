"""Small trainings of each framework, as functions that import it themselves."""

from __future__ import annotations

from typing import Any


def train_lightning() -> list[float]:
    import lightning.pytorch as pl

    return _train_lightning(pl)


def train_pytorch_lightning() -> list[float]:
    import pytorch_lightning as pl

    return _train_lightning(pl)


def _train_lightning(pl: Any) -> list[float]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    pl.seed_everything(7)
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4))
    return [float(value) for value in model.layer.weight.flatten()]


def train_transformers() -> list[float]:
    import tempfile

    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(7)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=16,
        )
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    rows = [{"input_ids": torch.arange(8), "labels": 1}] * 24
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return [float(value) for value in model.classifier.bias]


def train_accelerate() -> list[float]:
    import torch
    from accelerate import Accelerator

    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(4, 4)).square().mean())
        optimizer.step()
    return [float(value) for value in model.weight.flatten()]


def _rows() -> tuple[Any, Any]:
    import numpy

    random = numpy.random.default_rng(7)
    features = random.random((200, 4))
    return features, (features.sum(axis=1) > 2).astype(int)


def train_xgboost() -> list[float]:
    import xgboost

    features, labels = _rows()
    data = xgboost.DMatrix(features, labels)
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 5)
    return [float(value) for value in booster.predict(data)[:5]]


def train_lightgbm() -> list[float]:
    import lightgbm

    features, labels = _rows()
    parameters = {"objective": "binary", "num_threads": 1, "verbose": -1}
    booster = lightgbm.train(parameters, lightgbm.Dataset(features, labels), 5)
    return [float(value) for value in booster.predict(features)[:5]]


def train_sklearn() -> list[float]:
    import sklearn.ensemble as ensemble
    import sklearn.linear_model as linear_model

    features, labels = _rows()
    forest = ensemble.RandomForestClassifier(5, random_state=7).fit(features, labels)
    line = linear_model.LogisticRegression(max_iter=20).fit(features, labels)
    return [float(model.predict_proba(features)[0, 0]) for model in (forest, line)]


def use_pandas() -> list[float]:
    import io

    import pandas
    import pyarrow.parquet  # noqa: F401 - with the compression libraries of pyarrow

    file = io.BytesIO()
    pandas.DataFrame({"a": [1.0, 2.0]}).to_parquet(file)
    return [float(value) for value in pandas.read_parquet(file)["a"]]


def train_jax() -> list[float]:
    import jax
    import jax.numpy as jnp

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.square(jnp.ones((4, 4)) @ weights).mean()

    weights = jax.random.normal(jax.random.key(7), (4,))
    for _ in range(3):
        weights = weights - 0.1 * jax.grad(loss)(weights)
    return [float(value) for value in weights]


def train_tensorflow() -> list[float]:
    import tensorflow as tf

    tf.random.set_seed(7)
    weights = tf.Variable(tf.random.normal((4, 1)))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.ones((4, 4)) @ weights))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return [float(value) for value in weights.numpy().flatten()]


TRAININGS = {
    "accelerate": ("torch", train_accelerate),
    "jax": ("jax", train_jax),
    "lightgbm": ("none", train_lightgbm),
    "lightning": ("torch", train_lightning),
    "pyarrow": ("none", use_pandas),
    "pytorch_lightning": ("torch", train_pytorch_lightning),
    "sklearn": ("none", train_sklearn),
    "tensorflow": ("tensorflow", train_tensorflow),
    "transformers": ("torch", train_transformers),
    "xgboost": ("none", train_xgboost),
}
