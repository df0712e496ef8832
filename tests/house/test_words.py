"""What must not be said: names that mean nothing, work left for later, secrets, a home."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT, short, sources, texts

NO_NAMES_AT_ALL = {"common", "helpers", "misc", "util", "utils"}
READABLE = {".cfg", ".md", ".py", ".sh", ".tf", ".toml", ".txt", ".yaml", ".yml", ""}

LEFT_FOR_LATER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")
A_SECRET = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE " r"KEY-----")
SOMEBODYS_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[a-z]\w*|(?<![\w.])/ro[o]t/")

TEXTS = sorted(path for path in texts() if path.suffix in READABLE)


def test_every_module_is_called_after_what_it_is() -> None:
    nameless = [short(path) for path in sources() if set(path.parts) & NO_NAMES_AT_ALL]
    nameless += [short(path) for path in sources() if path.stem in NO_NAMES_AT_ALL]
    assert not nameless


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (LEFT_FOR_LATER, "do it now, or open an issue"),
        (A_SECRET, "a secret in the repository is public"),
        (SOMEBODYS_HOME, "this exists on one machine only"),
    ],
    ids=["left for later", "a secret", "somebody's home"],
)
def test_no_file_says(word: re.Pattern[str], why: str) -> None:
    said = [f"{short(path)}: {found[0]}" for path in TEXTS if (found := word.search(read(path)))]
    assert not said, f"{why}: {said}"


def test_no_file_names_the_folder_it_was_written_in() -> None:
    here = f"{ROOT}/"
    assert not [short(path) for path in TEXTS if here in read(path)]


def read(path: Path) -> str:
    return path.read_text(errors="replace")
