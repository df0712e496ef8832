"""`worker_runtime_env` is understood or refused whole, before anything starts."""

import json
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from spotfit.code.runtime_env import PackagedRuntimeEnv, RuntimeEnv
from spotfit.core.errors import ConfigError, ConfigErrors

ID = "ab" * 32


def test_nothing_wanted_is_nothing() -> None:
    assert RuntimeEnv.parse(None) == RuntimeEnv.parse({}) == RuntimeEnv()


def test_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    wanted = {
        "env_vars": {"A": "1"},
        "working_dir": str(tmp_path),
        "py_modules": [tmp_path / "mine"],
        "pip": ["einops==0.8.0"],
    }
    assert RuntimeEnv.parse(wanted) == RuntimeEnv(
        {"A": "1"}, tmp_path, (tmp_path / "mine",), ("einops==0.8.0",)
    )


def test_what_was_uploaded_before_is_named_by_its_id() -> None:
    parsed = RuntimeEnv.parse({"working_dir": f"sha256:{ID}", "py_modules": [f"sha256:{ID}"]})
    assert (parsed.working_dir, parsed.py_modules) == (ID, (ID,))


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RuntimeEnv.parse({"working_dir": "~"}).working_dir == tmp_path


def test_a_module_is_found_where_it_was_imported_from() -> None:
    (package, file) = RuntimeEnv.parse({"py_modules": [json, metadata]}).py_modules
    assert package == Path(json.__file__).parent
    assert isinstance(file, Path)
    assert file.name == "metadata"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"env_var": {}}, "no key 'env_var'. Did you mean 'env_vars'"),
        ({"excludes": ["*.bin"]}, ".spotfitignore"),
        ({"env_vars": ["A=1"]}, "must be a dictionary"),
        ({"env_vars": {"A": 1}}, "the value of 'A' is not a string"),
        ({"env_vars": {"A=B": "1"}}, "'A=B' is not a valid name"),
        ({"env_vars": {1: "1"}}, "1 is not a valid name"),
        ({"working_dir": 7}, "working_dir must be a path"),
        (
            {"working_dir": "no/such/place"},
            "the directory 'no/such/place' does not exist (relative to",
        ),
        ({"working_dir": None}, "working_dir must be a path"),
        ({"working_dir": __file__}, "does not exist"),
        ({"working_dir": "sha256:../../x"}, "does not exist"),
        ({"py_modules": "mine"}, "must be a list"),
        ({"py_modules": ["no_such_module"]}, "the package directory or .py file"),
        ({"py_modules": [ModuleType("made")]}, "module 'made' has no files"),
        ({"py_modules": [Path(__file__).parents[2] / "conftest.py", 3]}, "must be a path"),
        ({"pip": "torch"}, "one requirement goes into a list"),
        ({"pip": 3}, "pip must be a list"),
        ({"pip": [3]}, "each item of pip must be"),
        ({"pip": ["torch=2"]}, "'torch=2' is not a valid requirement"),
        ({"pip": ["-r other.txt"]}, "refers to a local file"),
        ({"pip": ["./mine"]}, "refers to a local file"),
    ],
)
def test_mistakes_are_told(wanted: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeEnv.parse(wanted)
    assert said in str(caught.value)


def test_a_directory_that_is_no_name_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my-lib").mkdir()
    (tmp_path / "lib.whl").touch()
    with pytest.raises(ConfigErrors, match="is not importable under its name") as caught:
        RuntimeEnv.parse({"py_modules": [tmp_path / "my-lib", tmp_path / "lib.whl"]})
    assert len(caught.value.errors) == 2


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        RuntimeEnv.parse(
            {"env_vars": {"A": 1, "B": None}, "working_dir": "gone", "pip": ["a=1"], "conda": {}}
        )
    assert len(caught.value.errors) == 5


def test_a_requirements_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# what we need\n"
        "--index-url https://example.invalid/simple\n\n"
        "einops==0.8.0 \\\n    --hash=sha256:00  # pinned\n"
        "mine @ https://example.invalid/mine.zip#egg\n"
    )
    assert RuntimeEnv.parse({"pip": str(tmp_path / "requirements.txt")}).pip == (
        "--index-url https://example.invalid/simple",
        "einops==0.8.0      --hash=sha256:00",
        "mine @ https://example.invalid/mine.zip#egg",
    )


@pytest.mark.parametrize(
    ("line", "pinned"),
    [
        ("msgspec", "msgspec=={}"),
        ("msgspec>=0.1", "msgspec=={}"),
        ("msgspec[toml] >=0.1,<99", "msgspec[toml]=={}"),
        ("msgspec; python_version=='3.11'", 'msgspec=={} ; python_version == "3.11"'),
        ("msgspec<0.1", "msgspec<0.1"),
        ("msgspec==0.1", "msgspec==0.1"),
        ("not-installed-anywhere", "not-installed-anywhere"),
    ],
)
def test_what_is_open_is_pinned_to_what_is_here(line: str, pinned: str) -> None:
    (found,) = RuntimeEnv.parse({"pip": [line]}).pip
    assert found == pinned.format(metadata.version("msgspec"))


def test_a_checkouts_own_version_is_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.0.dev3+g12ab")
    assert RuntimeEnv.parse({"pip": ["msgspec"]}).pip == ("msgspec",)


def test_a_build_of_one_machine_is_pinned_without_its_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    assert RuntimeEnv.parse({"pip": ["torch"]}).pip == ("torch==2.13.0",)


def test_equal_requirements_share_one_environment() -> None:
    assert (
        PackagedRuntimeEnv(pip=("a==1", "b==2")).pip_digest
        == PackagedRuntimeEnv(pip=("b==2", "a==1")).pip_digest
    )
    assert (
        PackagedRuntimeEnv(pip=("a==1",)).pip_digest != PackagedRuntimeEnv(pip=("a==2",)).pip_digest
    )


def test_what_pip_brings_is_known_by_its_distribution() -> None:
    env = PackagedRuntimeEnv(pip=("--no-index", "Scikit_Learn>=1", "a[b]==1 --hash=sha256:0"))
    assert env.pip_distributions() == {"scikit-learn", "a"}


def test_what_is_shipped_travels_as_bytes() -> None:
    env = PackagedRuntimeEnv({"A": "1"}, ID, (ID,), ("a==1",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(env), type=PackagedRuntimeEnv) == env


def test_a_removed_working_directory_spoils_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="that was removed"):
        RuntimeEnv.parse({"working_dir": "src"})
