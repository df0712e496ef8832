"""Documents: links lead somewhere, and what is shown as Python is Python."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from spotfit.host import env
from tests.house.tree import ROOT, documents, short

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
ANY_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
OUTSIDE = ("https://", "http://", "mailto:")

DOCUMENTS = documents()


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_every_link_leads_somewhere(document: Path) -> None:
    prose = ANY_FENCE.sub("", document.read_text())
    links = [plain or picture for plain, picture in LINK.findall(prose)]
    broken = [link for link in links if not link.startswith(OUTSIDE) and not leads(document, link)]
    assert not broken, f"{short(document)}: {broken}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_what_is_shown_as_python_compiles(document: Path) -> None:
    for _, block in FENCE.findall(document.read_text()):
        ast.parse(textwrap.dedent(block), filename=short(document))


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "STYLE.md", "CHANGELOG.md", "LICENSE"],
)
def test_a_newcomer_finds_what_they_look_for(name: str) -> None:
    assert (ROOT / name).is_file()


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_guide_to_the_environment_names_every_variable_that_is_read() -> None:
    guide = (ROOT / "docs/guides/environment.md").read_text()
    names = [name for setting in env.SETTINGS for name in (setting.name, setting.also) if name]
    assert [name for name in names if f"`{name}`" not in guide] == []


def leads(document: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (document.parent / name) if name else document
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def anchors(document: Path) -> set[str]:
    """The headings of a document, as links name them."""
    prose = ANY_FENCE.sub("", document.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(prose)
    }
