"""Names and prose use standard terms: unique class and module names, and no private words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import ROOT, SDK, relative_path, source_files

# Module names that may occur in several packages of the SDK: each package has one at most.
SHARED_MODULE_NAMES = {"__init__", "__main__", "api", "main"}

# Words of the project's first documents that are not terms of the field, beside the standard term.
PRIVATE_WORDS = {
    r"told|tells|telling": "reported, logged, sent",
    r"whoever|nobody|somebody|anybody|everybody": "name the process",
    r"anew": "again",
    r"dice": "RNG state",
    r"luggage": "code bundle",
    r"parcels?": "upload job",
    r"vaults?": "peer store",
    r"crews?": "worker pool",
    r"hubs?": "round coordinator",
    r"wardens?": "hang detector",
    r"errands?": "background call",
    r"caretakers?": "headless leader",
    r"stillborn|fruitless": "failed to boot, without progress",
    r"lives|lived": "processes, runs",
    r"goes on|went on|go on|going on": "continues",
    r"for ever": "indefinitely",
    r"so many|so long": "give the number",
    r"neighbou?rs?": "peer",
    r"let go": "release",
    r"luckless|theatre|weather|misfortune|keepsakes?": "a plain noun",
    r"gives? up|gave up|given up": "abandon, stop",
    r"by (?:himself|oneself)": "name the component",
    r"rooms|walls|doors?": "package, layer contract, interface",
    r"waist|guest|front door|dialects?": "interface, worker, entry point, framework",
}
_PRIVATE = {
    re.compile(rf"\b(?:{words})\b", re.IGNORECASE): use for words, use in PRIVATE_WORDS.items()
}

# Texts that other people wrote, such as messages of a vendor that we match or imitate.
QUOTED = {
    "No more than what is left": "example",
}


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in source_files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative_path(path))
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, repeated


def test_module_names_are_unique_in_the_sdk() -> None:
    places = defaultdict(list)
    for path in sorted(SDK.rglob("*.py")):
        if path.stem not in SHARED_MODULE_NAMES:
            places[path.stem].append(relative_path(path))
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, repeated


def test_strings_docstrings_and_comments_use_no_private_words() -> None:
    found = [
        f"{where}: {match[0]!r} (say: {use}) in: {text!r}"
        for path in source_files()
        for where, text in prose_of(path)
        for pattern, use in _PRIVATE.items()
        if (match := pattern.search(text)) and text not in QUOTED
    ]
    assert not found, f"{len(found)} private words:\n" + "\n".join(found)


def test_the_check_finds_a_private_word() -> None:
    tree = ast.parse('def f():\n    """Whoever leads is told."""\n    log.info("worker.dice")\n')
    texts = list(texts_of(tree))
    assert [text for _, text in texts] == ["Whoever leads is told.", "worker.dice"]
    assert all(any(pattern.search(text) for pattern in _PRIVATE) for _, text in texts)


def prose_of(path: Path) -> Iterator[tuple[str, str]]:
    """The location and sentence of every docstring, message, log event and comment of a module."""
    source = path.read_text()
    for line, text in texts_of(ast.parse(source)):
        yield f"{path.relative_to(ROOT)}:{line}", text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield f"{path.relative_to(ROOT)}:{token.start[0]}", token.string


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that a person reads: those with several words, and dotted names of log events."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for text in re.split(r"(?<=[.:;!?])\s+|\n\n", node.value):
                if " " in text.strip() or re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text.strip()):
                    yield node.lineno, " ".join(text.split())
