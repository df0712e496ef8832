"""Names and prose use standard terms: unique class and module names, and no private words."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import ROOT, SDK, UNIT, relative_path, source_files

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

# Words that sentences may contain, but names may not.
PRIVATE_WORDS_OF_NAMES = {
    r"tell|says?|said|asks?|asked|askers?": "message, response, request",
    r"story|stories|diary|diaries": "result, timeline, recorder",
    r"ours|theirs|mine": "name the owner: spotfit, ray, driver, expected",
    r"blame[ds]?|culprits?|victims?": "cause, part, target",
    r"moods?|moody|troubles?|deeds?": "error, fault, effect",
    r"tides?|season|ground|shelf|shelves": "market, faults, harness, store",
    r"keeper|scribe|vigil|uplink|sighting": "pool, writer, detector, connection, observation",
    r"strangers?|newcomers?|fellows|rivals?": "other, new agent, ranks",
    r"blows?|harm(ed)?|struck": "kill, corruption, reclaim",
    r"seat(s|ed)?|misfit|wish(es)?": "member, mismatch, request",
}
_ALL_WORDS = PRIVATE_WORDS | PRIVATE_WORDS_OF_NAMES
_PRIVATE = re.compile(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
_PRIVATE_IN_NAMES = re.compile(rf"\b(?:{'|'.join(_ALL_WORDS)})\b")

# Texts that other people wrote, such as messages of a vendor that we match or imitate.
QUOTED = {
    "No more than what is left": "example",
}

# Tests of the benchmarks, which name the two sides of a comparison `ours` and `theirs`.
UNCHECKED_NAMES = {UNIT / "benchmarks"}
NAMES_PER_FRAMEWORK = {"Checkpointer", "RayTrainReportCallback"}
"""Classes that exist for several training libraries under one public name."""


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in source_files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative_path(path))
    repeated = {
        name: where
        for name, where in places.items()
        if len(where) > 1 and name not in NAMES_PER_FRAMEWORK
    }
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
        f"{where}: {match[0]!r} (say: {standard_term(match[0])}) in: {text!r}"
        for path in checked_files()
        if path != Path(__file__)
        for where, text in prose_of(path)
        if (match := _PRIVATE.search(text)) and text not in QUOTED
    ]
    assert not found, f"{len(found)} private words:\n" + "\n".join(found)


def test_names_use_no_private_words() -> None:
    found = [
        f"{relative_path(path)}:{line}: {name} (say: {standard_term(match[0])})"
        for path in checked_files()
        if not UNCHECKED_NAMES & set(path.parents)
        for line, name in names_of(tree_of(path))
        if (match := _PRIVATE_IN_NAMES.search(words_of(name)))
    ]
    assert not found, f"{len(found)} private words in names:\n" + "\n".join(found)


def test_a_private_word_in_a_name_is_found() -> None:
    source = "def test_told(crew): ours = crew\nclass MoodyStore: wall_s = lives_of(told_at=1)"
    names = [words_of(name) for _, name in names_of(ast.parse(source))]
    assert sorted(names) == ["crew", "moody store", "ours", "test told", "wall s"]
    found = [name for name in names if _PRIVATE_IN_NAMES.search(name)]
    assert sorted(found) == ["crew", "moody store", "ours", "test told"]


def test_the_check_finds_a_private_word() -> None:
    tree = ast.parse('def f():\n    """Whoever leads is told."""\n    log.info("worker.dice")\n')
    texts = list(texts_of(tree))
    assert [text for _, text in texts] == ["Whoever leads is told.", "worker.dice"]
    assert all(_PRIVATE.search(text) for _, text in texts)
    assert standard_term("Whoever") == "name the process"


def checked_files() -> list[Path]:
    """Every module of the three packages and of the tests."""
    return [*source_files(), *sorted((ROOT / "tests").rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def standard_term(word: str) -> str:
    """What to write instead of a private word."""
    uses = (use for words, use in _ALL_WORDS.items() if re.fullmatch(words, word, re.IGNORECASE))
    return next(uses)


def prose_of(path: Path) -> Iterator[tuple[str, str]]:
    """The location and sentence of every docstring, message, log event and comment of a module."""
    source = path.read_text()
    for line, text in texts_of(tree_of(path)):
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


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that the module defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def words_of(name: str) -> str:
    """The words of an identifier in lower case, separated by spaces."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()
