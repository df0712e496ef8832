"""Parsing and validation of `worker_runtime_env`.

`RuntimeEnv` has local paths of the caller; `PackagedRuntimeEnv` has the ids of uploaded archives.
All invalid values are reported together.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NewType, Self

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, did_you_mean

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ArchiveId = NewType("ArchiveId", str)
"""The SHA-256 of an archive that is stored in the run's store already."""

CodeSource = Path | ArchiveId

_ARCHIVE_ID = re.compile(r"sha256:([0-9a-f]{64})")
# pip options that select package indexes and are valid in a requirements file. Options that name
# local files are rejected: the files do not exist on the machines.
_INDEX_OPTIONS = (
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--no-index",
    "--pre",
    "--prefer-binary",
    "--only-binary",
    "--no-binary",
    "--trusted-host",
    "-i ",
    "-f ",
)


class RuntimeEnv(msgspec.Struct, frozen=True):
    """The parsed `worker_runtime_env`, with paths of the caller's machine."""

    env_vars: dict[str, str] = {}
    working_dir: CodeSource | None = None
    py_modules: tuple[CodeSource, ...] = ()
    pip: tuple[str, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Self:
        """Parse the `worker_runtime_env` dictionary of the user; None is an empty environment.

        `working_dir` and `py_modules` are local paths, or 'sha256:…' of stored archives; `pip` is a
        list of requirements or the path of a requirements file, which is read. A requirement
        without an exact version is pinned to the installed version if that satisfies it, so that
        machines that join later install the same version as the first ones. Raises `ConfigError`,
        or `ConfigErrors` with all invalid values.
        """
        errors = ErrorCollector()
        fields: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if key in _PARSERS:
                fields[key] = errors.check(partial(_PARSERS[key], value))
                continue
            remedy = (
                "List files to exclude from working_dir in a .spotfitignore."
                if key == "excludes"  # Ray's name for the same purpose
                else f"Correct or remove the key {key!r}."
            )
            hint = did_you_mean(str(key), _PARSERS)
            errors.add(
                ConfigError(
                    f"RunConfig(worker_runtime_env=...) has no key {key!r}. {hint}", do=remedy
                )
            )
        errors.raise_all()
        return cls(**fields)

    def pip_distributions(self) -> frozenset[str]:
        """Return the canonical names (PEP 503) of the distributions in `pip`.

        For example `"scikit-learn"`, without versions; options of pip are left out. `fit()` does
        not compare the versions of these with those of the machines, where they will be installed.
        """
        return _distribution_names(self.pip)


class PackagedRuntimeEnv(msgspec.Struct, frozen=True):
    """A `RuntimeEnv` whose local code was uploaded to the run's store. Nodes prepare it."""

    env_vars: dict[str, str] = {}
    working_dir: str | None = None
    """Id of the archive that becomes the working directory and is importable."""
    py_modules: tuple[str, ...] = ()
    """Ids of the archives of importable modules."""
    pip: tuple[str, ...] = ()

    @property
    def pip_digest(self) -> str:
        """The SHA-256 of the requirements as 64 hex digits, independent of their order.

        Processes of a node with equal requirements share one virtual environment, named by it.
        """
        return hashlib.sha256("\n".join(sorted(self.pip)).encode()).hexdigest()

    def pip_distributions(self) -> frozenset[str]:
        """Return the canonical names (PEP 503) of the distributions in `pip`.

        For example `"scikit-learn"`, without versions; options of pip are left out. Machines do not
        compare the versions of these with those of the caller.
        """
        return _distribution_names(self.pip)


def _parse_env_vars(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        # The type instead of the value, which may contain secrets.
        raise _wrong_type_error("env_vars", type(value), "a dictionary of strings")
    errors = ErrorCollector()
    for name, text in value.items():
        # execve(2) takes NUL-terminated texts 'name=value'.
        if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
            errors.add(
                ConfigError(
                    f"worker_runtime_env={{'env_vars': ...}}: {name!r} is not a valid name of an "
                    "environment variable.",
                    do="Use a non-empty string without '=' and NUL characters.",
                )
            )
        elif not isinstance(text, str) or "\0" in text:
            # Without the value, which may be a secret.
            problem = "contains a NUL character" if isinstance(text, str) else "is not a string"
            message = f"worker_runtime_env={{'env_vars': ...}}: the value of {name!r} {problem}."
            errors.add(ConfigError(message, do="Write the value as a string without NUL."))
    errors.raise_all()
    return dict(value)


def _parse_working_dir(value: Any) -> CodeSource:
    code = _parse_code_source("working_dir", value)
    if isinstance(code, Path) and not code.is_dir():
        raise _missing_path_error("working_dir", code, "directory")
    return code


def _parse_py_modules(value: Any) -> tuple[CodeSource, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type_error("py_modules", value, "a list of paths or modules")
    return _parse_each(value, _parse_py_module)


def _parse_py_module(value: Any) -> CodeSource:
    if isinstance(value, ModuleType):
        # A package is archived with its directory, any other module as its file.
        paths = [*getattr(value, "__path__", ()), value.__dict__.get("__file__")]
        path = next(filter(None, paths), None)
        if path is None:
            raise ConfigError(
                f"worker_runtime_env={{'py_modules': ...}}: the module {value.__name__!r} has no "
                "files: it is built in, or was created at run time.",
                do=f"Remove {value.__name__!r} from py_modules.",
            )
        code: CodeSource = Path(path)
    else:
        code = _parse_code_source("py_modules", value)
    if not isinstance(code, Path):
        return code
    if not code.exists():
        raise _missing_path_error("py_modules", code, "package directory or .py file")
    # abspath: the name of '.' or '..' is the name of the directory.
    importable = code.is_dir() or code.suffix == ".py"
    if not importable or not Path(os.path.abspath(code)).stem.isidentifier():  # noqa: PTH100
        raise ConfigError(
            f"worker_runtime_env={{'py_modules': ...}}: {str(code)!r} is not importable under "
            "its name: it is not a .py file or a directory, or its name is no identifier.",
            do="Pass the package's directory (the one with __init__.py) or a .py file.",
        )
    return code


def _parse_pip(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        path = Path(value).expanduser()
        if not path.is_file():
            raise _missing_path_error(
                "pip", path, "requirements file (one requirement goes into a list)"
            )
        # As pip does: join continuation lines first, then remove comments.
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        value = [line for line in lines if line]
    if not isinstance(value, (list, tuple)):
        raise _wrong_type_error(
            "pip", value, "a list of requirements or the path of a requirements file"
        )
    return _parse_each(value, _parse_pip_line)


def _parse_pip_line(line: Any) -> str:
    if not isinstance(line, str):
        raise _wrong_type_error("each item of pip", line, "a string such as 'einops==0.8.0'")
    if line.startswith(_INDEX_OPTIONS):
        return line
    if line.startswith(("-", ".", "/")):
        raise ConfigError(
            f"worker_runtime_env={{'pip': ...}}: {line!r} refers to a local file, which does not "
            "exist on the machines.",
            do="List the requirements themselves, and pass your own code as py_modules.",
        )
    return _pin_version(line)


def _pin_version(line: str) -> str:
    """Pin a requirement to the installed version, unless it is exact or does not allow that."""
    from packaging.version import InvalidVersion, Version

    requirement = _parse_requirement(line)
    if requirement.url or any(s.operator in {"==", "==="} for s in requirement.specifier):
        return line
    try:
        version = Version(metadata.version(requirement.name))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return line
    # Development versions are in no package index, and local ones ('+cpu') only without the suffix.
    installed = version.public
    if version.is_devrelease or not requirement.specifier.contains(installed, prereleases=True):
        return line
    # The text of the requirement, to keep its extras and its marker.
    name, _, marker = str(requirement).partition(";")
    name = name.removesuffix(str(requirement.specifier)).strip()
    return f"{name}=={installed}" + (f" ;{marker}" if marker else "")


def _distribution_names(pip: Iterable[str]) -> frozenset[str]:
    names = (_parse_requirement(line).name for line in pip if not line.startswith("-"))
    # The canonical form of PEP 503, in which 'Scikit_Learn' and 'scikit-learn' are equal.
    return frozenset(re.sub(r"[-_.]+", "-", name).lower() for name in names)


def _parse_requirement(line: str) -> Requirement:
    # Imported lazily: the import costs 40 ms, and most runs install no packages.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        # Options of a line, such as --hash or --config-settings, are no part of a specifier.
        return Requirement(line.partition(" --")[0])
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"worker_runtime_env={{'pip': ...}}: {line!r} is not a valid requirement: {reason}",
            do="Write a requirement specifier as in a requirements file: 'einops>=0.8'.",
        ) from error


def _parse_code_source(what: str, value: Any) -> CodeSource:
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong_type_error(what, value, "a path")
    text = os.fspath(value)
    if match := _ARCHIVE_ID.fullmatch(str(text)):
        return ArchiveId(match[1])
    return Path(str(text)).expanduser()


def _parse_each(values: Iterable[Any], parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    errors = ErrorCollector()
    parsed = tuple(errors.check(partial(parse, value)) for value in values)
    errors.raise_all()
    return parsed


def _wrong_type_error(what: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"RunConfig(worker_runtime_env=...): {what} must be {expected}, not {value!r}.",
        do=f"Pass {expected}.",
    )


def _missing_path_error(what: str, path: Path, kind: str) -> ConfigError:
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:
        cwd = "a working directory that was removed"
    return ConfigError(
        f"RunConfig(worker_runtime_env=...): {what}: the {kind} {str(path)!r} does not exist "
        f"(relative to {cwd}).",
        do="Correct the path, or pass an absolute path.",
    )


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "env_vars": _parse_env_vars,
    "working_dir": _parse_working_dir,
    "py_modules": _parse_py_modules,
    "pip": _parse_pip,
}
