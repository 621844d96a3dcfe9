"""What the benchmarks for a GPU need besides torch, as a folder of wheels for a machine without network.

    python benchmarks/wheels.py build/wheels --python 3.12    # below 20 MiB; see docs/gpu.md

The wheels are for Linux on x86-64. Of some packages only the names are needed, because torchtune imports them
and nothing here uses them: these are in one more wheel, of stand-ins. So install them into a folder of their
own, where nothing else finds them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "torchtune==0.6.1",
    "torchao>=0.15,<0.16",
    "torchdata==0.11.0",
    "omegaconf",
    "pyyaml",
    "numpy==2.1.3",  # one of the smallest that there are for Python 3.11 to 3.13
    "safetensors>=0.8",
    "psutil",
    "tqdm",
    "packaging",
    "pytest<8.4",  # later ones need Pygments
    "pluggy",
    "iniconfig",
)
STAND_INS = (
    "datasets",
    "datasets.distributed",
    "sentencepiece",
    "tiktoken",
    "tiktoken.load",
    "tokenizers",
)
STAND_IN = '''"""Has the names that torchtune imports; nothing uses them."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
PURE = ("torchao",)
"""Packages that are taken without their kernels, which nothing uses: they are most of the wheel."""


def download(packages: Sequence[str], folder: Path, python: str) -> None:
    """Wheels of these packages and of nothing that they need."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)]
    platforms = [f"--platform={tag}" for tag in (*tags, "manylinux2014_x86_64")]
    for pure in (False, True):
        chosen = [one for one in packages if one.startswith(PURE) == pure]
        target = ["--abi=none", "--platform=any"] if pure else platforms
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
                *(*target, f"--dest={folder}", *chosen),
            ],
            check=True,
        )


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    modules: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> None:
    """A wheel of modules that can only be imported; it may have none. ``needed`` are its requirements."""
    about = f"{name}-{version}.dist-info"
    files = {f"{module.replace('.', '/')}/__init__.py": STAND_IN for module in modules}
    files |= {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in needed),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{about}/RECORD"
    files[record] = "".join(f"{path},,\n" for path in (*files, record))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def our_version() -> str:
    text = (Path(__file__).parents[1] / "torchtune_adaptive" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def needed() -> list[str]:
    """What the library and the recipes need."""
    root = Path(__file__).parents[1]
    library = tomllib.loads((root / "library" / "pyproject.toml").read_text())
    recipes = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]
    return [*library["project"]["dependencies"], *recipes["hooks"]["custom"]["dependencies"]]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument(
        "--python", default="3.12", help="the Python of that machine (default: 3.12)"
    )
    asked = arguments.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for old in asked.folder.glob("*.whl"):  # pip would refuse two versions of a package
        old.unlink()
    download(PACKAGES, asked.folder, asked.python)
    write_wheel(asked.folder, "stand_ins", "0", STAND_INS)
    # This package's own sources are carried as they are. They ask for their version, and for their ranges.
    write_wheel(asked.folder, "torchtune_adaptive", our_version(), needed=needed())
    size = sum(wheel.stat().st_size for wheel in asked.folder.glob("*.whl"))
    print(f"{asked.folder}: {size / 2**20:.1f} MiB for Python {asked.python}")


if __name__ == "__main__":
    main()
