"""A transformers.Trainer on two machines; a worker is killed and training continues in its epoch.

    pip install 'spotfit[torch,transformers]' scikit-learn
    python examples/transformers_digits.py

A tiny BERT with random weights reads images of digits as 16 tokens, each the sum of 2 by 2 pixels.
The data is part of scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import spotfit
from spotfit.huggingface import export_pretrained, prepare_trainer
from spotfit.torch import TorchTrainer


def train(config: dict[str, Any]) -> float:
    """Train and return the accuracy on digits that were not trained on."""
    from sklearn.datasets import load_digits
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    digits = load_digits()
    tokens = digits.images.reshape(-1, 4, 2, 4, 2).sum((2, 4)).reshape(-1, 16).astype(int)
    samples = [
        {"input_ids": image, "labels": int(label)}
        for image, label in zip(tokens, digits.target, strict=True)
    ]
    set_seed(1)
    bert = BertConfig(
        vocab_size=65,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=10,
        initializer_range=0.1,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(bert),
        args=TrainingArguments(
            output_dir="output",
            num_train_epochs=config["epochs"],
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            use_cpu=True,  # without GPUs Accelerate needs it to find the group
            save_strategy="no",  # spotfit saves
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=samples[:1400],
        eval_dataset=samples[1400:],
        compute_metrics=lambda output: {
            "accuracy": float((output.predictions.argmax(-1) == output.label_ids).mean())
        },
    )
    trainer.add_callback(KillOnce(config["killed"]))
    trainer = prepare_trainer(trainer, every=10)
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


def KillOnce(mark: str) -> Any:  # noqa: N802 - a class that needs transformers
    """Return a callback that kills the worker of rank 1 at step 25, as a preemption does."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_rank_one = spotfit.get_context().get_world_rank() == 1
            if state.global_step == 25 and is_rank_one and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def main() -> None:
    """Train, and load the result as a user of the model does."""
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            train_loop_config={"epochs": 6, "killed": f"{folder}/killed"},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(
                name="digits",
                storage_path=f"{folder}/bucket",
                failure_config=spotfit.FailureConfig(max_failures=3),
            ),
            provisioner="local?nodes=2",
        ).fit()
        # The model is tiny and without pretraining; guessing has 10 %.
        print(f"accuracy above 30 %: {result.return_value > 0.3}")
        assert result.checkpoint is not None
        export_pretrained(result.checkpoint, f"{folder}/model")
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/model")
        print(f"loaded {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
