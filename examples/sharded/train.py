"""Train with FSDP2 on several processes, and publish every step: each rank uploads what it holds.

    torchrun --nproc-per-node 2 examples/sharded/train.py URL [--steps 5] [--checkpoint FOLDER]

URL is a folder that all processes see, or a bucket: s3://…, gs://…, hf://buckets/…. With ``--checkpoint`` training
goes on from there, also on another number of processes, and is saved there at the end. Without one the model begins
anew, and a channel that has versions gets all of it as one more version. `weightcast pull URL replica` makes a
checkpoint folder of the newest version.

The model is a small transformer that learns to repeat what it read. On GPUs NCCL is used, otherwise gloo.
docs/guides/sharded.md explains the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import weightcast as wc

WORDS, WIDTH, LAYERS, LENGTH = 512, 256, 4, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](hidden)
        later = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device)
        hidden = hidden + self.attention(seen, seen, seen, attn_mask=later, need_weights=False)[0]
        return hidden + self.down(torch.relu(self.up(self.norms[1](hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words) + self.places.weight[: words.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, :-1].flatten(0, 1))  # of the next words


def loss_of(model: nn.Module, device: torch.device) -> torch.Tensor:
    half = torch.randint(0, WORDS, (8, LENGTH // 2), device=device)
    words = torch.cat([half, half], 1)
    return nn.functional.cross_entropy(model(words), words[:, 1:].flatten())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint of torch holds, on each rank its part of it."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the channel")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="where the training is saved, and goes on from")
    given = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same model on every rank
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    if given.checkpoint and given.checkpoint.exists():
        state = state_of(model, optimizer)
        load(state, checkpoint_id=given.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    torch.manual_seed(1 + done * distributed.get_world_size() + rank)  # other words on each rank

    with wc.Publisher(given.url, model, optimizer=optimizer, dtype="BF16") as publisher:
        for step in range(done + 1, done + given.steps + 1):
            loss_of(model, device).backward()
            optimizer.step()
            optimizer.zero_grad()
            receipt = publisher.publish(step=step)  # on every rank
            if rank == 0:
                made = receipt.result()  # waits for the commit, so that it can be printed
                size = sum(one.size for one in made.objects)
                print(f"version {made.position.version}, {size:,} bytes, {len(made.objects)} objects", flush=True)

    if given.checkpoint:
        save(state_of(model, optimizer), storage_writer=FileSystemWriter(given.checkpoint, overwrite=True))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
