"""Names of a package import their module on first use."""

import sys
from pathlib import Path

import pytest

from spotfit.core.lazy_names import is_loaded_instance

PACKAGE = """
from spotfit.core.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"answer": "lazy_package_of_test.module"})
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lazy_package_of_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "module.py").write_text("answer = object()")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_package_of_test", "lazy_package_of_test.module"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_name_imports_its_module_on_first_use() -> None:
    import lazy_package_of_test  # type: ignore[import-not-found]

    assert "lazy_package_of_test.module" not in sys.modules
    first = lazy_package_of_test.answer
    assert vars(lazy_package_of_test)["answer"] is first, "later accesses import nothing"


def test_another_name_is_an_attribute_error() -> None:
    import lazy_package_of_test

    with pytest.raises(AttributeError, match="'lazy_package_of_test' has no attribute 'question'"):
        lazy_package_of_test.question  # noqa: B018


def test_completion_offers_public_names_only() -> None:
    import lazy_package_of_test

    assert [name for name in dir(lazy_package_of_test) if name[0] != "_"] == ["answer"]


def test_instances_are_recognized_without_an_import() -> None:
    assert not is_loaded_instance("text", "lazy_package_of_test.module", "Answer")
    assert "lazy_package_of_test.module" not in sys.modules
    assert is_loaded_instance(Path(), "pathlib", "PurePath", "Path")
    assert not is_loaded_instance("text", "pathlib", "PurePath", "Path")
