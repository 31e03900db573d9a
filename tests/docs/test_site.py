"""The site's table of contents and its reference are complete."""

import re
from pathlib import Path

import hush

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w-]+\.md", contents)) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    named = re.findall(r"^::: hush\.\S+\.(\w+)$", page, re.MULTILINE)
    assert [name for name in named if name != "functional"] == [name for name in hush.__all__ if name in hush._ROOM]
