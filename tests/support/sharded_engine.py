"""A small engine that fuses, shards, stacks, transposes, pads and ties parameters, as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Bag, random_bits

import weightcast as wc
from weightcast.engine.box_digests import combine
from weightcast.engine.learn import TORCH_DTYPES, learn
from weightcast.engine.live import LiveParameters
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import TensorSpec

Stream = Iterable[tuple[str, torch.Tensor]]


BF16, F32 = torch.bfloat16, torch.float32


def model_of(**tensors: torch.Tensor) -> torch.nn.Module:
    """A model with these parameters, filled with bits of no meaning; the same tensor twice is tied."""
    model, rng = torch.nn.Module(), np.random.default_rng(7)
    made: dict[int, torch.nn.Parameter] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(
                torch.from_numpy(np.frombuffer(rng.bytes(storage.nbytes()), np.uint8).copy())
            )
            made[id(tensor)] = torch.nn.Parameter(tensor, requires_grad=False)
        model.register_parameter(name, made[id(tensor)])
    return model


def memory(model: torch.nn.Module) -> dict[str, bytes]:
    """Every bit that a model's parameters and buffers are made of."""
    return {
        name: bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def weights_of(shapes: Mapping[str, tuple[str, tuple[int, ...]]], seed: int = 0, *, finite: bool = False) -> Bag:
    rng = np.random.default_rng(seed)
    bits = {}
    for name, (dtype, shape) in shapes.items():
        spec = TensorSpec(name, dtype, shape)
        bits[spec] = random_bits(rng, spec)
        if finite:
            values = torch.from_numpy(rng.standard_normal(shape)).to(TORCH_DTYPES[dtype]).reshape(-1)
            bits[spec] = values.view(torch.uint8).numpy().view(spec.kind.word).copy()
    return Bag(bits)


def stream(weights: Bag) -> Stream:
    for spec in weights.table:
        raw = torch.from_numpy(weights.read(spec.name).copy().view(np.uint8))
        yield spec.name, raw.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def together(workers: Iterable[LiveParameters], weights: Bag) -> dict[str, object]:
    workers = list(workers)
    return {spec.name: combine(spec, [box for live in workers for box in live.digest(spec)]) for spec in weights.table}


HIDDEN, HEAD, VOCABULARY, PADDED, INNER, EXPERTS = 8, 2, 10, 12, 6, 3


SHAPES = {
    "embed": ("BF16", (VOCABULARY, HIDDEN)),
    "q": ("BF16", (4 * HEAD, HIDDEN)),
    "k": ("BF16", (HEAD, HIDDEN)),
    "v": ("BF16", (HEAD, HIDDEN)),
    "q_bias": ("BF16", (4 * HEAD,)),
    "o": ("BF16", (HIDDEN, 4 * HEAD)),
    "gate": ("BF16", (INNER, HIDDEN)),
    "up": ("BF16", (INNER, HIDDEN)),
    "down": ("BF16", (HIDDEN, INNER)),
    "norm": ("BF16", (HIDDEN,)),
    "router": ("BF16", (EXPERTS, HIDDEN)),
    "scale": ("F32", ()),
} | {f"experts.{e}.{kind}": ("BF16", (HIDDEN, INNER) if kind == "down" else (INNER, HIDDEN))
     for e in range(EXPERTS) for kind in ("gate", "up", "down")}  # fmt: skip


@dataclass
class Engine:
    """One of two workers: fused, sharded, stacked, transposed, padded and tied."""

    rank: int
    workers: int = 2

    def make(self) -> torch.nn.Module:
        n = self.workers
        embed = torch.empty(PADDED // n, HIDDEN, dtype=BF16)
        return model_of(
            embed=embed,
            lm_head=embed,
            qkv=torch.empty(4 * HEAD // n + 2 * HEAD, HIDDEN, dtype=BF16),
            qkv_bias=torch.empty(4 * HEAD // n, dtype=BF16),
            o=torch.empty(HIDDEN, 4 * HEAD // n, dtype=BF16),
            gate_up=torch.empty(2 * INNER // n, HIDDEN, dtype=BF16),
            down=torch.empty(INNER // n, HIDDEN, dtype=BF16),  # transposed
            norm=torch.empty(HIDDEN, dtype=BF16),
            router=torch.empty(EXPERTS, HIDDEN, dtype=F32),  # widened
            scale=torch.empty((), dtype=F32),
            w13=torch.empty(EXPERTS, 2 * INNER // n, HIDDEN, dtype=BF16),
            w2=torch.empty(EXPERTS, HIDDEN, INNER // n, dtype=BF16),
        )

    def load(self, model: torch.nn.Module, given: Stream) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in given:
            self._load(parameters, name, tensor)

    def _shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.workers
        return tensor.narrow(dim, self.rank * size, size)

    def _load(self, p: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> None:
        half = INNER // self.workers
        queries = 4 * HEAD // self.workers
        if name == "embed":
            rows = p["lm_head"].shape[0]
            first = self.rank * rows
            mine = x[first : min(first + rows, VOCABULARY)]
            p["lm_head"][: mine.shape[0]].data.copy_(mine)
            p["lm_head"].data[mine.shape[0] :].fill_(0)
        elif name in ("q", "k", "v"):
            offset = {"q": 0, "k": queries, "v": queries + HEAD}[name]
            mine = self._shard(x, 0) if name == "q" else x
            target = p["qkv"].data.narrow(0, offset, mine.shape[0])
            assert target.shape == mine.shape
            target.copy_(mine)
        elif name == "q_bias":
            p["qkv_bias"].data.copy_(self._shard(x, 0))
        elif name in ("gate", "up"):
            p["gate_up"].data.narrow(0, half * (name == "up"), half).copy_(self._shard(x, 0))
        elif name == "o":
            p["o"].data.copy_(self._shard(x, 1).contiguous())
        elif name == "down":
            p["down"].data.copy_(self._shard(x, 1).t().contiguous())
        elif name.startswith("experts"):
            _, number, kind = name.split(".")
            if kind == "down":
                p["w2"].data[int(number)] = self._shard(x, 1)
            else:
                p["w13"].data[int(number), half * (kind == "up") :][:half].copy_(self._shard(x, 0))
        else:
            p[name].data.copy_(x)


def live_worker(engine: Engine, weights: Bag, **options: Any) -> tuple[torch.nn.Module, LiveParameters]:
    """A worker that was started with these weights and digested."""
    model = engine.make()
    layout = learn(model, lambda given: engine.load(model, given), weights.table)
    engine.load(model, stream(weights))
    live = LiveParameters(model, layout, **options)
    for spec in weights.table:
        live.digest(spec)
    return model, live


def staged(old: Bag, new: Bag, folder: Path) -> PatchReader:
    """A patch as a mirror stages it."""
    path = folder / f"{len(list(folder.iterdir()))}.patch"
    wc.write_patch(old, new, path, codec="plain")
    return PatchReader(FileSource(path))
