"""Tests mirror the source: `x.py` is tested in `test_x.py` and `test_x_<topic>.py`."""

from pathlib import Path

from tests.house.tree import (
    BENCHMARKS,
    LOCALSIM,
    PROVISIONERS,
    SDK,
    UNIT,
    count_body_lines,
    relative_path,
    source_files,
)

MAX_UNTESTED_BODY_LINES = 12  # smaller modules are covered by the tests of their users

TESTED_ELSEWHERE: dict[str, str] = {
    "sdk/spotfit/core/errors.py": "tests/house/test_errors_pickle.py",
    # With tables that their own libraries write.
    "sdk/spotfit/data/sources/lance_tables.py": "tests/frameworks/test_data_tables.py",
    "sdk/spotfit/data/sources/table_files.py": "tests/frameworks/test_data_tables.py",
    # With the real loops of Lightning.
    "sdk/spotfit/lightning/fit_checkpointer.py": "tests/frameworks/test_lightning.py",
    "sdk/spotfit/lightning/logged_values.py": "tests/frameworks/test_lightning.py",
    "sdk/spotfit/lightning/loop_state.py": "tests/frameworks/test_lightning.py",
    # They need training libraries, which `make frameworks` installs.
    "sdk/spotfit/huggingface/accelerate.py": "tests/frameworks/test_accelerate.py",
    "sdk/spotfit/huggingface/trainer_report_callback.py": "tests/frameworks/test_huggingface.py",
    "sdk/spotfit/huggingface/snapshot_trainer.py": "tests/frameworks/test_huggingface.py",
    "sdk/spotfit/huggingface/trainer_preparation.py": "tests/frameworks/test_huggingface.py",
    "sdk/spotfit/huggingface/trainer_state.py": "tests/frameworks/test_huggingface.py",
    "sdk/spotfit/testing/provisioner_suite.py": "tests/contract/test_provisioners.py",
}


def test_every_source_file_has_a_test_file() -> None:
    untested = [
        f"{relative_path(path)}: write {relative_path(mirror_of(path))}"
        for path in source_files()
        if not has_tests(mirror_of(path))
        and relative_path(path) not in TESTED_ELSEWHERE
        and count_body_lines(path) > MAX_UNTESTED_BODY_LINES
    ]
    assert not untested, "\n".join(untested)


def test_every_test_file_mirrors_a_source_file() -> None:
    known = {mirror_of(path) for path in source_files()}
    known |= {UNIT / "benchmarks" / f"test_{path.stem}.py" for path in BENCHMARKS.glob("*.py")}
    unmatched = [
        relative_path(path)
        for path in UNIT.rglob("test_*.py")
        if not any(mirrors(path, test_file) for test_file in known)
    ]
    assert not unmatched, "\n".join(unmatched)


def test_every_exception_is_needed() -> None:
    known = {relative_path(path): mirror_of(path) for path in source_files()}
    stale = [name for name in TESTED_ELSEWHERE if name not in known or has_tests(known[name])]
    assert not stale, "\n".join(stale)


def test_a_topic_after_the_module_name_still_mirrors_the_module() -> None:
    writer = UNIT / "checkpoint" / "test_writer.py"
    assert mirrors(writer, writer)
    assert mirrors(writer.with_name("test_writer_snapshot.py"), writer)
    assert not mirrors(writer.with_name("test_writers.py"), writer)
    assert not mirrors(UNIT / "store" / "test_writer_snapshot.py", writer)


def has_tests(test_file: Path) -> bool:
    return any(mirrors(path, test_file) for path in test_file.parent.glob("test_*.py"))


def mirrors(path: Path, test_file: Path) -> bool:
    """Whether `path` is the test file of a module, or one for a topic of the module."""
    return path == test_file or (
        path.parent == test_file.parent and path.stem.startswith(f"{test_file.stem}_")
    )


def mirror_of(source: Path) -> Path:
    """Return `tests/unit/<package>/test_x.py` for `sdk/spotfit/<package>/x.py`."""
    for package, folder in ((SDK, ""), (PROVISIONERS, "provisioners"), (LOCALSIM, "localsim")):
        if source.is_relative_to(package):
            place = source.relative_to(package)
            return UNIT / folder / place.parent / f"test_{place.stem.strip('_')}.py"
    raise AssertionError(f"{source} is in none of the packages")
