"""The table of contents is true: every public name is there, once, and loads."""

from pathlib import Path

import hush

MODULES = {"functional", "recipes"}


def test_every_public_name_loads() -> None:
    assert sorted({*hush._ROOM, *MODULES, "__version__"}) == sorted(hush.__all__)
    for name in hush._ROOM:
        found = getattr(hush, name)
        assert f"{found.__module__}.".startswith(f"hush.{hush._ROOM[name]}.")
    assert dir(hush) == hush.__all__
    assert hush.functional.per_example is hush.per_example


def test_the_version_is_that_of_the_package() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{hush.__version__}"' in project
