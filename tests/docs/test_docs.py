"""What the documentation names exists: functions, files, public names, links, and commands with their options."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

import hush
from hush.commands import app as cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PLACES = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", (ROOT / "docs" / "paper.md").read_text())


def names_in(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """What is defined in a body, and the bodies of its classes."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body if isinstance(node, ast.ClassDef) else []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = []
    return found


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_the_papers_lines_are_where_the_page_says(file: str, name: str) -> None:
    path = ROOT / file if file.split("/")[0] in ("examples", "experiments") else ROOT / "src" / "hush" / file
    assert path.is_file(), file
    body = ast.parse(path.read_text()).body
    for part in filter(None, name.split(".")):
        assert part in names_in(body), f"{file} has no {name}"
        body = names_in(body)[part]


def test_the_page_of_the_paper_names_many_places() -> None:
    assert len(PLACES) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_public_names_exist(page: Path) -> None:
    for dotted in re.findall(r"\bhush\.([A-Za-z_][\w.]*)", page.read_text()):
        if dotted.split(".")[-1] in ("hush", "py", "toml"):
            continue
        found: object = hush
        for part in dotted.rstrip(".").split("."):
            found = getattr(found, part, None) or _submodule(found, part)
        assert found is not None, f"{page.name}: hush.{dotted}"


def test_the_whole_library_is_on_one_page() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    assert [name for name in hush.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_page_of_fit_has_all_its_arguments() -> None:
    page = (ROOT / "docs" / "fit.md").read_text().split("## All arguments")[1].split("## ")[0]
    assert [name for name in inspect.signature(hush.fit).parameters if not re.search(rf"`{name}\b", page)] == []


def _submodule(package: object, name: str) -> object:
    from importlib import import_module

    return import_module(f"{package.__name__}.{name}")  # type: ignore[attr-defined]


def commands() -> list[str]:
    """Lines in blocks of code that begin with `hush`, without the remarks behind them."""
    found = set()
    for page in PAGES:
        for block in page.read_text().split("```")[1::2]:
            found |= {re.split(r"\s{3,}|#", line)[0].strip() for line in block.splitlines() if line.startswith("hush ")}
    return sorted(found)


def test_the_documentation_shows_commands() -> None:
    assert len(commands()) > 10


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_documentation_have_these_options(line: str) -> None:
    command: object = typer.main.get_command(cli.app)
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"{line}: no command {name}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
    for word in words:
        word = word.strip("[]")  # what may be left out stands in brackets
        if word.startswith("--"):
            assert word in options, f"{line}: no option {word}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_is_the_example(page: str) -> None:
    program = (ROOT / page).read_text().split("## A first program\n\n```python\n")[1].split("```")[0]
    assert program.strip() == (ROOT / "examples" / "first.py").read_text().split("\n", 2)[2].strip()


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/reference.md", "docs/security.md"}
    assert linked == pages
