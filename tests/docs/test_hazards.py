"""The page of hazards is true: every hazard stands on it once, and has the tests that it promises."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEVERAL_PROCESSES = {13, 14, 15, 16}  # refused, by the test of hazard 14


def test_every_hazard_has_a_test() -> None:
    page = (ROOT / "docs" / "hazards.md").read_text()
    numbers = [int(n) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for n in row.split(",")]
    assert sorted(numbers) == list(range(1, 43))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"def test_\w*?hazards?_((?:\d+_(?:and_)?)+)", tests)
    tested = {int(number) for name in names for number in re.findall(r"\d+", name)}
    assert set(numbers) - tested - SEVERAL_PROCESSES == set()
