"""The error for a dataset that the trainer does not have."""

from __future__ import annotations

from spotfit.model.config import unknown_dataset_error


def test_an_unknown_dataset_is_a_key_error_with_a_suggestion() -> None:
    error = unknown_dataset_error("trian", ["train", "valid"])
    assert isinstance(error, KeyError)
    assert "Did you mean 'train'?" in str(error)
    assert "datasets={'train'" in str(unknown_dataset_error(None, []))
