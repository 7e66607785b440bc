"""The built wheel in an empty environment: it installs with its core dependencies alone, and its command works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from cases import gaussian, one, write_file

import weightcast as wc

ROOT = Path(__file__).parents[1]


def run(*command: object, **options: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # or it would be found
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_installs_and_its_command_works(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    binaries = tmp_path / "empty" / "bin"
    run(binaries / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    weights = one(gaussian(np.random.default_rng(0), 1000))
    write_file(tmp_path / "weights.safetensors", weights)
    facts = run(binaries / "weightcast", "digest", "--json", "weights.safetensors", cwd=tmp_path)
    assert json.loads(facts)["digest"] == wc.fingerprint(weights).digest
    installed = run(binaries / "pip", "list", "--format=freeze")
    assert "torch" not in installed
    located = run(binaries / "python", "-c", "import weightcast; print(weightcast.__file__)", cwd=tmp_path)
    assert Path(located.strip()).is_relative_to(tmp_path)
    assert (Path(located.strip()).parent / "py.typed").exists()
