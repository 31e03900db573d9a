"""The picture in docs/architecture.md is true: imports go only where its table says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hush"


def allowed() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9_]+) \| ?([a-z0-9_, ]*)\|$", text.split("## Directions")[1], flags=re.M)
    return {room: {name.strip() for name in names.split(",") if name.strip()} for room, names in rows if room != "room"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """Rooms that the file imports, at its top or inside a function; `from hush import x` counts as the room x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "hush" else [f"hush.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; the house uses absolute ones")
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("hush.")}
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_directions(path: Path) -> None:
    room, table = room_of(path), allowed()
    assert room in table, f"docs/architecture.md has no row for {room}"
    stray = rooms_imported(path) - table[room] - {room}
    assert not stray, f"{room} may not import {sorted(stray)}"


def test_the_table_names_only_rooms_that_exist() -> None:
    rooms = {room_of(path) for path in FILES}
    table = allowed()
    assert set(table) == rooms
    assert set().union(*table.values()) <= rooms


def test_every_direction_is_used() -> None:
    used: dict[str, set[str]] = {room: set() for room in allowed()}
    for path in FILES:
        used[room_of(path)] |= rooms_imported(path) - {room_of(path)}
    assert used == allowed()


def test_at_most_twenty_files_and_packages_lie_at_the_root() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 20, sorted(path.name for path in entries)


def test_the_directions_have_no_circle() -> None:
    table = allowed()
    done: set[str] = set()
    while len(done) < len(table):
        ready = {room for room, needs in table.items() if needs <= done} - done
        assert ready, f"circle among {sorted(set(table) - done)}"
        done |= ready


def test_oracles_never_import_hush() -> None:
    for path in (ROOT / "tests" / "oracles").rglob("*.py"):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.alias)]
        assert "hush" not in {name.split(".")[0] for name in names} and not rooms_imported(path), path


def test_accounting_needs_no_torch() -> None:
    code = "import sys, hush.accounting, hush.commands.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_library_loads_no_heavy_part_of_scipy_before_something_is_accounted() -> None:
    code = (
        "import sys, hush; hush.Private, hush.Plan, hush.fit; "
        "sys.exit(any(f'scipy.{name}' in sys.modules for name in ('special', 'optimize', 'fft', 'stats')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
