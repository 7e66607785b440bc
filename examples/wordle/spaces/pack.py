"""Puts together what a Space needs: its own files, the example's modules, and a wheel of weightcast.

    make wheel
    python -m examples.wordle.spaces.pack vllm build/spaces/vllm
    hf upload me/wordle-vllm build/spaces/vllm --type space

docs/guides/wordle.md has the rest.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SPACES = ("vllm", "environment", "trainer")
WITHOUT_WHEEL = ("environment",)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "spaces", "trl")


def pack(space: str, into: Path, dist: Path = ROOT / "dist") -> None:
    """`FileExistsError` if the folder is there, `FileNotFoundError` if a wheel is needed and ``dist`` has none."""
    wheels = sorted(dist.glob("weightcast-*.whl"))
    if space not in WITHOUT_WHEEL and not wheels:
        raise FileNotFoundError("there is no wheel in dist: run `make wheel` first")
    shutil.copytree(HERE / space, into)
    example = into / "examples" / "wordle"
    shutil.copytree(HERE.parent, example, ignore=LEFT_OUT)
    (example / "spaces").mkdir()
    for name in ("__init__.py", "proxy.py"):
        shutil.copy(HERE / name, example / "spaces" / name)
    shutil.copy(HERE.parents[1] / "__init__.py", into / "examples" / "__init__.py")
    if space not in WITHOUT_WHEEL:
        shutil.copy(wheels[-1], into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("into", type=Path, help="a folder that is not there yet")
    given = parser.parse_args()
    try:
        pack(given.space, given.into)
    except OSError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
