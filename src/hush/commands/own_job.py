"""A person's own job: `path/to/script.py:function` or `module:function` -> the Job that the function returns."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hush.training import Job

T = TypeVar("T")


def load_job(named: str) -> "Job":
    """Import the file or module, call the function, and check that a Job came back."""
    from hush.training import Job

    return load_function(named, Job, instead="mnist, fashion-mnist, or ")


def load_function(named: str, kind: type[T], *arguments: Any, instead: str = "") -> T:
    """Import the file or module, call the function with these arguments, and check what came back."""
    place, colon, function = named.rpartition(":")
    if not colon or not place or not function:
        what = "job" if instead else "function"
        raise ValueError(f"unknown {what} {named!r}: expected {instead}path/to/script.py:function (module:function)")
    with _located(place):
        module = _module(place)
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"{place} has no function {function!r}")
    with _located(named):
        made = make(*arguments)
    if not isinstance(made, kind):
        raise ValueError(f"{named} must return a hush.{kind.__name__}, got {type(made).__name__}")
    return made


def _module(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise _NotThere(f"no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickling look a module up by its name
        sys.path.insert(0, str(path.parent.resolve()))  # so that it finds its neighbours, as when run as a script
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise _NotThere(f"no module {place!r}; for a file write path/to/script.py:function") from None
        raise


class _NotThere(ValueError):
    """There is no such file or module; nobody's code has failed."""


@contextmanager
def _located(named: str) -> Iterator[None]:
    """What a person's own code raises, in one line with the place where it was raised."""
    try:
        yield
    except _NotThere:
        raise
    except SyntaxError as error:  # it names the line itself
        raise ValueError(f"{named} cannot be read: {error}") from error
    except SystemExit as error:
        raise ValueError(f"{named} ended the process (exit {error.code}) while it was read") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename and "<frozen" not in frame.filename]
        last = (own or frames)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise ValueError(f"{named} raised {type(error).__name__}: {error} ({where})") from error
