"""Names of Ray that spotfit does not have."""

import importlib
import pickle

import pytest

import spotfit
from spotfit.core.errors import UnsupportedNameError
from spotfit.core.unsupported_names import UNSUPPORTED_NAMES

NAMES = [(module, name) for module, names in UNSUPPORTED_NAMES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_a_from_import_raises_an_import_error_with_the_remedy(module: str, name: str) -> None:
    with pytest.raises(UnsupportedNameError, match=f"{module} has no {name}") as raised:
        __import__(module, fromlist=[name])
    assert isinstance(raised.value, ImportError)
    assert raised.value.do == UNSUPPORTED_NAMES[module][name].do


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_an_attribute_access_raises_an_attribute_error_with_the_remedy(
    module: str, name: str
) -> None:
    package = importlib.import_module(module)
    with pytest.raises(AttributeError) as raised:
        getattr(package, name)
    assert UNSUPPORTED_NAMES[module][name].do in str(raised.value)
    assert not hasattr(package, name)
    assert getattr(package, name, None) is None


def test_a_from_statement_raises_the_error_with_the_remedy() -> None:
    with pytest.raises(UnsupportedNameError, match=r"Call spotfit\.get_context\(\)"):
        from spotfit import get_world_size  # noqa: F401


def test_a_call_of_a_missing_function_raises_an_attribute_error_with_the_remedy() -> None:
    with pytest.raises(AttributeError, match=r"Call spotfit\.get_context\(\)\.get_world_size\(\)"):
        spotfit.get_world_size()


def test_an_import_of_another_name_raises_the_error_of_python() -> None:
    with pytest.raises(ImportError, match="cannot import name 'question' from 'spotfit'") as raised:
        from spotfit import question  # noqa: F401
    assert not isinstance(raised.value, UnsupportedNameError)


def session() -> None:
    """A function with the name of a module of Ray AIR."""


def test_the_module_of_a_pickled_function_is_found_among_the_loaded_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "__module__", None)
    # pickle asks each loaded module, also spotfit, for an attribute of this name.
    assert pickle.loads(pickle.dumps(session)) is session
