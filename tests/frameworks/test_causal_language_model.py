"""A script in the style of transformers' run_clm.py, with the changes that the guide describes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")  # also for the imports of spotfit.huggingface

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import spotfit
from spotfit.huggingface import export_pretrained, prepare_trainer
from spotfit.torch import TorchTrainer

BLOCK = 16
CHARACTERS = string.ascii_lowercase
TEXT = "".join(CHARACTERS) * 30


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=CHARACTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def train(config: dict[str, Any]) -> float:
    """The body of run_clm's main(): arguments, tokenizer, blocks of tokens, Trainer."""
    parser = HfArgumentParser((TrainingArguments,))
    (training_args,) = parser.parse_dict(config)
    set_seed(training_args.seed)
    tokenizer = character_tokenizer()
    tokens = tokenizer(TEXT)["input_ids"]
    blocks = [tokens[at : at + BLOCK] for at in range(0, len(tokens) - BLOCK, BLOCK)]
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": BLOCK}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape))
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer = prepare_trainer(trainer, every="auto")
    train_result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    return float(train_result.training_loss)


def test_the_script_trains_and_its_checkpoint_is_loaded_with_its_tokenizer(
    tmp_path: Path,
) -> None:
    config = {
        "output_dir": str(tmp_path / "output"),
        "max_steps": 4,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
    }
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=spotfit.ScalingConfig(num_workers=0),
        run_config=spotfit.RunConfig(name="clm", storage_path=str(tmp_path / "bucket")),
    ).fit()
    assert result.checkpoint is not None
    exported = tmp_path / "exported"
    export_pretrained(result.checkpoint, exported, processing_class=character_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(exported)
    saved = AutoModelForCausalLM.from_pretrained(config["output_dir"])
    for name, weight in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.lm_head.weight is model.transformer.wte.weight, "tied, as in training"
    encoded = AutoTokenizer.from_pretrained(exported)(TEXT[:9])["input_ids"]
    assert encoded == list(range(9))
