"""Train a small transformer on the text of Python's own documentation, byte by byte.

    python examples/torch_lm.py
    mpirun -np 2 python examples/torch_lm.py --checkpoint lm.pt

The text is what `help("topics")` can show, some 460 kB that come with Python. Run the second
command again, with more epochs, and training goes on where it ended: also after Ctrl-C, with the
last epoch that was complete. Gradients accumulate over two backward passes, travel as bfloat16
and are clipped.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import hvdlite_torch as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model with hvdlite and PyTorch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and pass")
    parser.add_argument("--passes", type=int, default=2, help="backward passes per step")
    parser.add_argument("--window", type=int, default=64, help="bytes that the model looks at")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps with a smaller lr")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--bytes", type=int, default=None, help="use so much of the text only")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to resume from")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_text(limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on, and those that follow, to validate with."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()[:limit]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    end = len(data) * 9 // 10
    return data[:end], data[end:]


class LanguageModel(nn.Module):
    """A transformer that tells the next byte from those before it."""

    def __init__(self, window: int, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(window, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        mask = nn.Transformer.generate_square_subsequent_mask(window)
        self.register_buffer("mask", mask, persistent=False)
        nn.init.normal_(self.bytes.weight, std=0.05)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(windows) + self.positions
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        # The weights that read bytes also predict them.
        return self.norm(hidden) @ self.bytes.weight.t()


def windows_of(data: torch.Tensor, length: int) -> torch.Tensor:
    """Cut data into windows of `length` bytes and the one that follows each of them."""
    return data.unfold(0, length + 1, length)


def batches(windows: torch.Tensor, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield this rank's batches of an epoch, as many and as large as on every other rank."""
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    order = order[: len(order) // hvd.size() * hvd.size()]
    for mine in order[hvd.rank() :: hvd.size()].split(batch_size):
        yield windows[mine]


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all bytes, in nats."""
    predicted = model(windows[:, :-1])
    return F.cross_entropy(predicted.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def train_epoch(
    model: nn.Module, optimizer: Any, scheduler: Any, parts: list[torch.Tensor], args: Any
) -> None:
    """Step once for every `args.passes` batches; what is left at the end makes a step, too."""
    steps = [parts[i : i + args.passes] for i in range(0, len(parts), args.passes)]
    for step in tqdm(steps, unit="step", mininterval=0.5, leave=False, disable=hvd.rank() != 0):
        optimizer.zero_grad()
        predictions = sum(len(part) for part in step) * args.window
        for part in step:
            (loss_of(model, part) / predictions).backward()
        # Only the gradient of all ranks together has the norm to clip by.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()


@torch.no_grad()
def validate(model: nn.Module, windows: torch.Tensor, batch_size: int) -> float:
    """Return the loss in bits per byte; every rank looks at its part."""
    mine = windows[hvd.rank() :: hvd.size()].split(batch_size)
    total = sum((loss_of(model, part).double() for part in mine), torch.zeros(()).double())
    total = hvd.allreduce(total, name="validation", op=hvd.Sum)
    return total.item() / (len(windows) * (windows.shape[1] - 1)) / math.log(2)


def bits_by_frequency(train: torch.Tensor, valid: torch.Tensor) -> float:
    """Return the bits per byte of a model that only knows how frequent each byte is."""
    counts = torch.bincount(train, minlength=256) + 1.0
    return -(counts / counts.sum()).log2()[valid].mean().item()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that is complete or not there at all, whenever the job may end."""
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    train, valid = load_text(args.bytes)
    train_windows, valid_windows = windows_of(train, args.window), windows_of(valid, args.window)

    model = LanguageModel(args.window, args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
    )

    # Only rank 0 needs to see the file; the others get everything from it.
    progress: dict[str, Any] = {"epochs": 0, "scheduler": scheduler.state_dict()}
    if hvd.rank() == 0 and args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = saved["progress"]
    progress = hvd.broadcast_object(progress, root_rank=0)
    scheduler.load_state_dict(progress["scheduler"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16,
        backward_passes_per_step=args.passes,
    )
    if hvd.rank() == 0:
        print(f"by frequency alone: {bits_by_frequency(train, valid):.3f} bits per byte")
        if progress["epochs"]:
            print(f"resumed after epoch {progress['epochs']}", flush=True)

    bits = validate(model, valid_windows, args.batch_size)
    for epoch in range(progress["epochs"], args.epochs):
        start = time.perf_counter()
        parts = list(batches(train_windows, args.batch_size, args.seed + epoch))
        train_epoch(model, optimizer, scheduler, parts, args)
        speed = len(train) / (time.perf_counter() - start) / 1000
        bits = validate(model, valid_windows, args.batch_size)
        if hvd.rank() == 0:
            if args.checkpoint is not None:
                progress = {"epochs": epoch + 1, "scheduler": scheduler.state_dict()}
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(args.checkpoint, state | {"progress": progress})
            print(f"epoch {epoch + 1}: {bits:.3f} bits per byte, {speed:.0f} kB/s", flush=True)
    if hvd.rank() == 0:
        print(f"validation: {bits:.6f} bits per byte")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the checkpoint holds the last epoch that was complete")
