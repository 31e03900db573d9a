"""The table of contents is true: every public name is there, once, and loads."""

import hush


def test_every_public_name_loads() -> None:
    assert sorted(hush._ROOM) == hush.__all__
    for name in hush.__all__:
        found = getattr(hush, name)
        assert f"{found.__module__}.".startswith(f"hush.{hush._ROOM[name]}.")
    assert dir(hush) == hush.__all__
