"""A training history as a channel: its size against its folders, zstd over them, git-lfs and Xet.

    python benchmarks/history.py [--checkpoints 50] [--every 10]

Trains a small transformer with AdamW, first to where the loss has fallen and then with advantages of both signs, as in
RL, and saves a checkpoint every few steps: once with float32 masters that are saved in bf16 and once in bf16 alone, at
two learning rates. Each history is imported into a channel, and every step is exported again and compared with its
file, byte by byte. Needs torch, zstd's command, and huggingface_hub with hf_xet for Xet.

Sizes only, so that the machine's load does not matter. Another machine's torch may train to other bits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from weightcast.channel.chain import Chain
from weightcast.interop.exporting import chosen, export_versions
from weightcast.interop.importing import import_steps
from weightcast.interop.layouts import opened
from weightcast.store import open_store

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 512, 128, 4, 48, 8
WARM_UP = 400
RATES = (1e-6, 1e-4)
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        hidden = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def text(generator: torch.Generator) -> torch.Tensor:
    """A batch of a language in which each word has four that can follow it."""
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(LENGTH):
        choice = torch.randint(4, (BATCH, 1), generator=generator)
        tokens = torch.cat([tokens, (tokens[:, -1:] * 7 + choice * 31 + 3) % VOCABULARY], 1)
    return tokens


def step(model: Model, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, advantages: torch.Tensor) -> float:
    logits = model(tokens[:, :-1]).float().transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)
    loss = (losses * advantages).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(losses.mean().detach())


def train(folder: Path, masters: bool, rate: float, checkpoints: int, every: int) -> dict[str, float]:
    """Write the checkpoints of one training; the losses after the warm-up and at the end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = 0.0
    for _ in range(WARM_UP):
        loss = step(model, optimizer, text(generator), torch.ones(BATCH))
    found = {"loss after warm-up": loss}
    if not masters:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for number in range(1, checkpoints * every + 1):
        advantages = torch.randn(BATCH, generator=generator)
        loss = step(model, optimizer, text(generator), advantages - advantages.mean())
        if number % every == 0:
            made = folder / f"checkpoint-{number}"
            made.mkdir(parents=True)
            tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
            save_file(tensors, made / "model.safetensors", {"format": "pt"})
            (made / "config.json").write_text('{"model_type": "small"}\n')
    return found | {"loss at the end": loss}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lfs_size(folder: Path) -> int:
    """git-lfs stores each distinct file whole."""
    return sum({hashlib.sha256(data).digest(): len(data) for data in _contents(folder)}.values())


def _contents(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.read_bytes()


def zstd_size(folder: Path, level: int) -> int:
    """One archive of all folders, steps in order, in a window that holds all of it."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: int(name.rpartition("-")[2]))
    tar = ["tar", "--create", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--directory", str(folder)]
    with subprocess.Popen([*tar, *names], stdout=subprocess.PIPE) as archive:
        command = ["zstd", f"-{level}", "--long=31", "--single-thread", "--stdout"]
        with subprocess.Popen(
            command, stdin=archive.stdout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdout is not None
            total = 0
            while packed := child.stdout.read(1 << 20):
                total += len(packed)
    if archive.returncode or child.returncode:
        sys.exit("tar or zstd failed")
    return total


def xet_size(folder: Path, place: Path) -> int:
    """What the real hf_xet uploads, all folders at once: chunks that no file before had, compressed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    hub_of_tests = importlib.import_module("hub")
    with hub_of_tests.serving(place) as hub:
        hub.make_bucket("history")
        code = (
            "import sys, pathlib\n"
            "from huggingface_hub import batch_bucket_files\n"
            "root = pathlib.Path(sys.argv[1])\n"
            "files = sorted(path for path in root.rglob('*') if path.is_file())\n"
            "batch_bucket_files(sys.argv[2], add=[(str(path), str(path.relative_to(root))) for path in files])\n"
        )
        command = [sys.executable, "-c", code, str(folder), f"{hub_of_tests.OWNER}/history"]
        subprocess.run(command, env={**os.environ, **hub.environment, **QUIET}, check=True)
        files = hub.buckets[f"{hub_of_tests.OWNER}/history"].values()
        if sum(file.size for file in files) != size(folder):
            sys.exit("not all files arrived")
        return size(hub.folder / "contents")


def channel_size(folder: Path, place: Path) -> dict[str, Any]:
    """All objects of the channel, and what a version takes; every step's file is made again and compared."""
    store = open_store(place / "channel")
    (place / "import").mkdir()
    source = opened(folder)
    done = list(import_steps(store, source, place / "import", place / "mirror"))
    chain = Chain.open(store)
    (place / "export").mkdir()
    for one in export_versions(chain, chosen(chain, "history"), place / "out", place / "export"):
        here, there = (root / one.name / "model.safetensors" for root in (folder, place / "out"))
        if here.read_bytes() != there.read_bytes():
            sys.exit(f"{one.name} was not recreated")
    later = [one for one in done[1:] if one.manifest is not None]
    elements = chain.channel.table.elements * max(len(later), 1)
    return {
        "channel": size(place / "channel"),
        "version_0": done[0].nbytes,
        "version_bytes": round(sum(one.nbytes for one in later) / max(len(later), 1)),
        "changed": round(sum(one.manifest.changed for one in later if one.manifest) / elements, 5),
    }


def measure(masters: bool, rate: float, checkpoints: int, every: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="history-") as made:
        root = Path(made)
        run = root / "run"
        losses = train(run, masters, rate, checkpoints, every)
        folders = size(run)
        return {
            "training": "float32 masters" if masters else "bf16",
            "rate": rate,
            "checkpoints": checkpoints,
            "every": every,
            "checkpoint_bytes": folders // checkpoints,
            "folders": folders,
            "git_lfs": lfs_size(run),
            "xet": xet_size(run, root / "hub"),
            "zstd_3_long": zstd_size(run, 3),
            "zstd_19_long": zstd_size(run, 19),
            **channel_size(run, root),
            **losses,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="training steps from one checkpoint to the next")
    chosen_by_user = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for masters in (True, False):
        for rate in RATES:
            print(json.dumps(measure(masters, rate, chosen_by_user.checkpoints, chosen_by_user.every)), flush=True)


if __name__ == "__main__":
    main()
