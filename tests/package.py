"""The package as others get it: `python -m tests.package types` checks its types, `... install` runs it elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("llmgeom", "probes", "prompts", "wind_tunnels", "reports")
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
SMALL = ("--model", "pocket:pythia", "--domain", "math", "--n", "40", "--limit", "150", "--control-models", "3", "-q")
LARGE = ("torch", "transformers", "sklearn", "scipy", "plotly", "datasets", "accelerate", "transformer_lens")


def copied(to: Path) -> Path:
    """The source without what was built or run in it."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.refused", "*.tmp", "*.pyc")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    return to


def built(source: Path, what: str, to: Path) -> Path:
    """A wheel or an sdist of a source folder, by the hooks that every installer calls."""
    to.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(to)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return to / done.stdout.strip().splitlines()[-1]


def unpacked(sdist: Path, to: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(to, filter="data")
    (folder,) = to.iterdir()
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def borrowed(folder: Path, wheel: Path) -> Path:
    """The Python of an empty environment with this wheel in it. What the wheel asks for is borrowed from the
    environment that runs this: its folder is on the path, but none of its .pth files is read, so that an editable
    install there is not seen."""
    python = _empty(folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    there = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    Path(there, "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), *_more()}) + "\n")
    return python


def _more() -> list[str]:
    """Folders of packages on the path that are not this environment's own, e.g. those it borrows itself."""
    return [one for one in sys.path if one.endswith("site-packages") and Path(one).is_dir()]


def _empty(folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def user(folder: Path) -> Path:
    """A folder of someone who calls things as we do: whoever imports one of these instead of ours finds out."""
    loud = "raise RuntimeError(f'{__name__} of the user was imported')\n"
    for name in ("probes/__init__.py", "probes/value_manifold.py", "prompts.py", "reports.py", "wind_tunnels.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(loud)
    return folder


def alone() -> dict[str, str]:
    """This environment's variables, less those that lead Python back to the source."""
    kept = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}


def checked(python: Path, what: list[str], folder: Path, followed: bool) -> subprocess.CompletedProcess:
    """mypy by our settings, with the packages of an environment and the modules of a folder; `followed`: the large
    libraries too, which takes three times as long."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if not followed:
        modules = ", ".join(f'"{name}.*"' for name in LARGE)
        settings += f'\n[[tool.mypy.overrides]]\nmodule = [{modules}]\nfollow_imports = "skip"\n'
    (folder / "settings.toml").write_text(settings)
    flags = ["--config-file", "settings.toml", "--cache-dir", "cache", "--python-executable", str(python)]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *what], capture_output=True, text=True, env=alone(), cwd=folder
    )


def _types() -> int:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        python = borrowed(here / "env", built(copied(here / "source"), "wheel", here))
        done = checked(python, ["-p", "llmgeom"], here, followed=True)
    print(done.stdout, done.stderr)
    return done.returncode


def _install() -> int:
    """As a user: everything from the index, torch first (asked for through another package it may bring CUDA)."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        wheel = built(unpacked(built(copied(here / "source"), "sdist", here), here / "sdist"), "wheel", here)
        python = _empty(here / "env")
        for what in ("torch", str(wheel)):
            limits = ["--constraint", str(ROOT / "constraints.txt")]
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *limits, what]
            subprocess.run(pip, check=True, cwd=here)
        place = user(here / "user")
        return subprocess.run(
            [str(python.parent / "llmgeom"), "scan", *SMALL, "--out", "run"], cwd=place, env=alone()
        ).returncode


if __name__ == "__main__":
    sys.exit({"types": _types, "install": _install}[sys.argv[1]]())
