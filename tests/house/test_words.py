"""No file contains meaningless module names, deferred work, secrets or private paths."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT, relative_path, source_files, text_files

MEANINGLESS_NAMES = {"common", "helpers", "misc", "util", "utils"}
TEXT_SUFFIXES = {".cfg", ".md", ".py", ".sh", ".tf", ".toml", ".txt", ".yaml", ".yml", ""}

DEFERRED_WORK = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")
SECRET = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE " r"KEY-----")
HOME_DIRECTORY = re.compile(r"(?<![\w.])/(?:home|Users)/[a-z]\w*|(?<![\w.])/ro[o]t/")

TEXTS = sorted(path for path in text_files() if path.suffix in TEXT_SUFFIXES)


def test_module_names_are_specific() -> None:
    found = [relative_path(path) for path in source_files() if set(path.parts) & MEANINGLESS_NAMES]
    found += [relative_path(path) for path in source_files() if path.stem in MEANINGLESS_NAMES]
    assert not found


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (DEFERRED_WORK, "do it now, or open an issue"),
        (SECRET, "a secret in the repository is public"),
        (HOME_DIRECTORY, "this exists on one machine only"),
    ],
    ids=["deferred work", "secret", "home directory"],
)
def test_no_file_contains(pattern: re.Pattern[str], reason: str) -> None:
    matches = [
        f"{relative_path(path)}: {found[0]}"
        for path in TEXTS
        if (found := pattern.search(read(path)))
    ]
    assert not matches, f"{reason}: {matches}"


def test_no_file_contains_the_path_of_this_checkout() -> None:
    checkout = f"{ROOT}/"
    assert not [relative_path(path) for path in TEXTS if checkout in read(path)]


def read(path: Path) -> str:
    return path.read_text(errors="replace")
