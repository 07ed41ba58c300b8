"""The models that are trained: seeded, the same on every rank, on data of each rank's own."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MODELS", "TINY", "build"]

MODELS = {
    "mlp": "MLP of 25 M parameters",
    "cnn": "CNN with batch norm, 11 M",
    "transformer": "transformer encoder, 6.6 M",
}
TINY = "tiny"


def build(name: str, rank: int) -> tuple[Any, Any, Any]:
    """Return a model, and one batch of inputs and targets, as torch objects.

    Args:
        name: of the model.
        rank: decides on the data, and on nothing else.
    """
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(42)
    model = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer, TINY: _tiny}[name](torch.nn)
    data = torch.Generator().manual_seed(1000 + rank)
    if name == "transformer":
        tokens = torch.randint(0, 512, (8, 65), generator=data)
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
    shape = {"mlp": (32, 1024), "cnn": (16, 3, 32, 32), TINY: (4, 16)}[name]
    inputs = torch.randn(shape, generator=data)
    return model, inputs, torch.randint(0, 10, (shape[0],), generator=data)


def _tiny(nn: Any) -> Any:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


def _mlp(nn: Any) -> Any:
    layers: list[Any] = []
    for inputs, outputs in ((1024, 3072), (3072, 3072), (3072, 3072), (3072, 1024)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _cnn(nn: Any) -> Any:
    """Return a residual network of 18 layers for small images."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.straight = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.short = nn.Identity()
            if stride != 1 or inputs != outputs:
                self.short = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
            self.end = nn.ReLU()

        def forward(self, images: Any) -> Any:
            return self.end(self.straight(images) + self.short(images))

    layers: list[Any] = [
        nn.Conv2d(3, 64, 3, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _transformer(nn: Any) -> Any:
    """Return an encoder that guesses the next of 512 tokens, at every place."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(512, 256),
        nn.TransformerEncoder(layer, 8, enable_nested_tensor=False),
        nn.Linear(256, 512),
    )
