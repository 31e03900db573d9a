"""SECURITY.md names tests for its promises: they are there, and each promise has one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = re.findall(r"^\*\*(P\d+)\..*?(?=^\*\*P\d+\.|^A run with a fixed seed)", text, flags=re.M | re.S)
    assert promises == [f"P{n}" for n in range(1, 11)]
    for promise in re.split(r"^\*\*(?=P\d+\.)", text.split("## What is promised")[1], flags=re.M)[1:]:
        named = re.findall(r"`(tests/[^`]*)`", promise.split("\n## ")[0])
        assert named, promise[:60]
        for name in named:
            place = ROOT / name
            assert place.is_dir() or re.search(r"^\s*def test_|^def main", place.read_text(), flags=re.M), name
