"""Documentation: links resolve, Python blocks compile, generated pages are up to date."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from spotfit.host import env
from tests.house.tree import ROOT, markdown_files, relative_path

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
ANY_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
OUTSIDE = ("https://", "http://", "mailto:")

DOCUMENTS = markdown_files()


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_every_link_resolves(document: Path) -> None:
    prose = ANY_FENCE.sub("", document.read_text())
    links = [plain or image for plain, image in LINK.findall(prose)]
    broken = [
        link for link in links if not link.startswith(OUTSIDE) and not resolves(document, link)
    ]
    assert not broken, f"{relative_path(document)}: {broken}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_every_python_block_compiles(document: Path) -> None:
    for _, block in FENCE.findall(document.read_text()):
        ast.parse(textwrap.dedent(block), filename=relative_path(document))


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "STYLE.md", "CHANGELOG.md", "LICENSE"],
)
def test_the_standard_files_exist(name: str) -> None:
    assert (ROOT / name).is_file()


def test_decision_numbers_have_no_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_environment_guide_lists_every_variable() -> None:
    guide = (ROOT / "docs/guides/environment.md").read_text()
    names = [name for setting in env.ENV_VARS for name in (setting.name, setting.ray_name) if name]
    assert [name for name in names if f"`{name}`" not in guide] == []


def test_every_test_that_the_threat_model_names_exists() -> None:
    guide = (ROOT / "docs/guides/threat_model.md").read_text()
    rows = [row for row in guide.splitlines() if re.match(r"\| (?!attempt|-)", row)]
    tests = [re.search(r"`(tests/[\w/.]+)::(\w+)` \|$", row) for row in rows]
    assert None not in tests, "every line names its test"
    missing = [
        found[0]
        for found in filter(None, tests)
        if f"def {found[2]}(" not in (ROOT / found[1]).read_text()
    ]
    assert missing == []


def test_the_decision_index_lists_every_record() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text()
    missing = [one.name for one in folder.glob("[0-9]*.md") if f"({one.name})" not in index]
    assert not missing


def test_the_index_lists_every_guide() -> None:
    index = (ROOT / "docs/README.md").read_text()
    guides = [*(ROOT / "docs/guides").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]
    missing = [one.name for one in guides if f"({one.parent.name}/{one.name})" not in index]
    assert not missing


def test_the_readme_links_the_index() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_the_reference_lists_each_error_once() -> None:
    rows = (ROOT / "docs/reference/errors.md").read_text().splitlines()
    names = [row.split("|")[1].strip() for row in rows if row.startswith("| `")]
    assert "`NCCLHangError`" in names
    assert len(names) == len(set(names))


def test_the_generated_reference_is_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / ".ci/reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def resolves(document: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (document.parent / name) if name else document
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def anchors(document: Path) -> set[str]:
    """The anchors of the headings of a document."""
    prose = ANY_FENCE.sub("", document.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(prose)
    }
