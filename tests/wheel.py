"""What a user installs: the source archive, the wheel built from it, and programs in an empty environment.

    python tests/wheel.py [--keep FOLDER]

Builds both from a copy of the tracked files, installs the wheel without its extras in a new environment, and runs
there, in an empty folder: the import, the example of one call, and the command line without its packages and with them.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).parent.parent
FIRST_NAMES = """
import importlib.util, pathlib, sys, hush
hush.Private, hush.Plan, hush.fit, hush.Ledger, hush.Sanitizer, hush.dp_pca
for extra in ("typer", "rich", "matplotlib", "triton", "tensorboard"):
    assert extra not in sys.modules, extra
assert importlib.util.find_spec("typer") is None, "this environment should not have it"
assert "site-packages" in hush.__file__, hush.__file__
assert (pathlib.Path(hush.__file__).parent / "py.typed").exists()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="copy the archive and the wheel there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hush-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for made in (folder / "dist").iterdir():
                shutil.copy(made, options.keep)
        use(wheel, folder)
    print("wheel: built, installed and used")


def build(folder: Path) -> Path:
    """The archive from the tracked files; the wheel from the archive, so that nothing is missing in either."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, check=True).stdout
    source, dist = folder / "source", folder / "dist"
    for path in filter(None, tracked.decode().split("\0")):
        if (HOME / path).is_file():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HOME / path, source / path)
    backend = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", backend, "build_sdist", dist, cwd=source)
    (archive,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    run(sys.executable, "-c", backend, "build_wheel", dist, cwd=folder / archive.name.removesuffix(".tar.gz"))
    return next(dist.glob("*.whl"))


def use(wheel: Path, folder: Path) -> None:
    empty, python = folder / "empty", folder / "environment" / "bin" / "python"
    empty.mkdir()
    run(sys.executable, "-m", "venv", folder / "environment", cwd=empty)
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", HOME / "constraints.txt")
    run(*install, wheel, cwd=empty)
    run(python, "-I", "-c", FIRST_NAMES, cwd=empty)
    run(python, "-I", HOME / "examples" / "one_call.py", cwd=empty)
    command = python.parent / "hush"
    bare = subprocess.run([command, "epsilon"], cwd=empty, capture_output=True, text=True)
    assert bare.returncode == 2 and bare.stderr.count("\n") == 1 and "hush[cli]" in bare.stderr, bare
    run(*install, f"{wheel}[cli]", cwd=empty)
    said = run(command, "epsilon", "--rate", "0.01", "--noise", "4", "--steps", "10000", "--delta", "1e-5", cwd=empty)
    assert "0.947" in said, said
    left = [path.name for path in empty.iterdir()]
    assert not left, f"left behind: {left}"


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wheel: {' '.join(map(str, command))[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
