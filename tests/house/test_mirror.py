"""Tests mirror the source: who knows a file knows where its story is told."""

from pathlib import Path

from tests.house.tree import (
    BENCHMARKS,
    LOCALSIM,
    PROVISIONERS,
    SDK,
    UNIT,
    short,
    sources,
    working_lines,
)

TOO_SMALL_TO_NEED_A_STORY = 12  # lines inside functions

TOLD_ELSEWHERE: dict[str, str] = {
    "sdk/spotfit/checkpoint/peer.py": "tests/unit/agent/test_vault.py asks a real vault",
    "sdk/spotfit/core/errors.py": "tests/house/test_errors_pickle.py takes each class",
    "sdk/spotfit/testing/provisioner_suite.py": "tests/contract/test_provisioners.py inherits it",
}


def test_every_source_file_has_its_story() -> None:
    untold = [
        f"{short(path)}: write {short(story_of(path))}"
        for path in sources()
        if not story_of(path).exists()
        and short(path) not in TOLD_ELSEWHERE
        and working_lines(path) > TOO_SMALL_TO_NEED_A_STORY
    ]
    assert not untold, "\n".join(untold)


def test_every_story_is_about_a_file() -> None:
    known = {story_of(path) for path in sources()}
    known |= {UNIT / "benchmarks" / f"test_{path.stem}.py" for path in BENCHMARKS.glob("*.py")}
    strays = [short(path) for path in UNIT.rglob("test_*.py") if path not in known]
    assert not strays, "\n".join(strays)


def test_no_excuse_is_out_of_date() -> None:
    known = {short(path): story_of(path) for path in sources()}
    stale = [name for name in TOLD_ELSEWHERE if name not in known or known[name].exists()]
    assert not stale, "\n".join(stale)


def story_of(source: Path) -> Path:
    """`sdk/spotfit/<room>/x.py` is told in `tests/unit/<room>/test_x.py`."""
    for package, folder in ((SDK, ""), (PROVISIONERS, "provisioners"), (LOCALSIM, "localsim")):
        if source.is_relative_to(package):
            place = source.relative_to(package)
            return UNIT / folder / place.parent / f"test_{place.stem.strip('_')}.py"
    raise AssertionError(f"{source} is in none of our packages")
