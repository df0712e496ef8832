"""`worker_runtime_env` is parsed and validated completely before a run starts."""

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


def test_empty_runtime_env_has_defaults() -> None:
    assert RuntimeEnv.parse(None) == RuntimeEnv.parse({}) == RuntimeEnv()


def test_all_keys_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    runtime_env = {
        "env_vars": {"A": "1"},
        "working_dir": str(tmp_path),
        "py_modules": [tmp_path / "package"],
        "pip": ["einops==0.8.0"],
    }
    assert RuntimeEnv.parse(runtime_env) == RuntimeEnv(
        {"A": "1"}, tmp_path, (tmp_path / "package",), ("einops==0.8.0",)
    )


def test_uploaded_archive_is_referenced_by_its_digest() -> None:
    parsed = RuntimeEnv.parse({"working_dir": f"sha256:{ID}", "py_modules": [f"sha256:{ID}"]})
    assert (parsed.working_dir, parsed.py_modules) == (ID, (ID,))


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RuntimeEnv.parse({"working_dir": "~"}).working_dir == tmp_path


def test_imported_module_is_replaced_by_its_path() -> None:
    (package, file) = RuntimeEnv.parse({"py_modules": [json, metadata]}).py_modules
    assert package == Path(json.__file__).parent
    assert isinstance(file, Path)
    assert file.name == "metadata"


@pytest.mark.parametrize(
    ("runtime_env", "text"),
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
        ({"py_modules": "package"}, "must be a list"),
        ({"py_modules": ["no_such_module"]}, "the package directory or .py file"),
        ({"py_modules": [ModuleType("generated")]}, "module 'generated' has no files"),
        ({"py_modules": [Path(__file__).parents[2] / "conftest.py", 3]}, "must be a path"),
        ({"pip": "torch"}, "one requirement goes into a list"),
        ({"pip": 3}, "pip must be a list"),
        ({"pip": [3]}, "each item of pip must be"),
        ({"pip": ["torch=2"]}, "'torch=2' is not a valid requirement"),
        ({"pip": ["-r other.txt"]}, "refers to a local file"),
        ({"pip": ["./package"]}, "refers to a local file"),
    ],
)
def test_invalid_values_are_rejected(runtime_env: dict[Any, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeEnv.parse(runtime_env)
    assert text in str(caught.value)


def test_directory_without_a_valid_module_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "my-lib").mkdir()
    (tmp_path / "lib.whl").touch()
    with pytest.raises(ConfigErrors, match="is not importable under its name") as caught:
        RuntimeEnv.parse({"py_modules": [tmp_path / "my-lib", tmp_path / "lib.whl"]})
    assert len(caught.value.errors) == 2


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        RuntimeEnv.parse(
            {"env_vars": {"A": 1, "B": None}, "working_dir": "missing", "pip": ["a=1"], "conda": {}}
        )
    assert len(caught.value.errors) == 5


def test_requirements_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# requirements\n"
        "--index-url https://example.invalid/simple\n\n"
        "einops==0.8.0 \\\n    --hash=sha256:00  # pinned\n"
        "package @ https://example.invalid/package.zip#egg\n"
    )
    assert RuntimeEnv.parse({"pip": str(tmp_path / "requirements.txt")}).pip == (
        "--index-url https://example.invalid/simple",
        "einops==0.8.0      --hash=sha256:00",
        "package @ https://example.invalid/package.zip#egg",
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
def test_requirements_are_pinned_to_installed_versions(line: str, pinned: str) -> None:
    (found,) = RuntimeEnv.parse({"pip": [line]}).pip
    assert found == pinned.format(metadata.version("msgspec"))


def test_version_of_a_checkout_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.0.dev3+g12ab")
    assert RuntimeEnv.parse({"pip": ["msgspec"]}).pip == ("msgspec",)


def test_local_version_label_is_removed_from_a_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    assert RuntimeEnv.parse({"pip": ["torch"]}).pip == ("torch==2.13.0",)


def test_digest_does_not_depend_on_the_order_of_requirements() -> None:
    assert (
        PackagedRuntimeEnv(pip=("a==1", "b==2")).pip_digest
        == PackagedRuntimeEnv(pip=("b==2", "a==1")).pip_digest
    )
    assert (
        PackagedRuntimeEnv(pip=("a==1",)).pip_digest != PackagedRuntimeEnv(pip=("a==2",)).pip_digest
    )


def test_distributions_of_requirements_are_normalized() -> None:
    env = PackagedRuntimeEnv(pip=("--no-index", "Scikit_Learn>=1", "a[b]==1 --hash=sha256:0"))
    assert env.pip_distributions() == {"scikit-learn", "a"}


def test_packaged_runtime_env_round_trips() -> None:
    env = PackagedRuntimeEnv({"A": "1"}, ID, (ID,), ("a==1",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(env), type=PackagedRuntimeEnv) == env


def test_removed_working_directory_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with pytest.raises(ConfigError, match="that was removed"):
        RuntimeEnv.parse({"working_dir": "src"})
