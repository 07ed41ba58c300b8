"""Known tensors and small models for the PyTorch tests, and what must become of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from . import expected

torch = pytest.importorskip("torch")
nn = torch.nn


DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64"
    ).split()
}
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.complex64: 1e-6}


def tensor(rank: int, shape: Any, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """Return one rank's input: small integers, which all types hold exactly."""
    base = "float32" if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")
    return torch.as_tensor(expected.known(rank, shape, base, seed)).to(dtype)


def wanted(inputs: Sequence[Any], op: str) -> Any:
    """Return the reduction of all ranks' inputs."""
    dtype = inputs[0].dtype
    arrays = [(t.float() if dtype is torch.bfloat16 else t).numpy() for t in inputs]
    return torch.as_tensor(expected.reduced(arrays, op)).to(dtype)


def assert_close(result: Any, wanted: Any, what: str = "", tolerance: float | None = None) -> None:
    """Check type, shape and values: exact for integers, to rounding for the rest."""
    assert isinstance(result, torch.Tensor), f"{what}: {type(result)}"
    tolerance = _TOLERANCE.get(wanted.dtype, 1e-13) if tolerance is None else tolerance
    torch.testing.assert_close(
        result, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def digest(tensors: Iterable[Any]) -> str:
    """Return a hash of the bits, types and shapes of tensors."""
    summary = hashlib.sha256()
    for item in tensors:
        item = item.detach().contiguous()
        summary.update(f"{item.dtype}{tuple(item.shape)}".encode())
        summary.update(item.reshape(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def assert_same_on_all_ranks(comm: Any, tensors: Iterable[Any]) -> None:
    """Check that all ranks hold the same bits."""
    digests = comm.allgather(digest(tensors))
    assert len(set(digests)) == 1, f"the ranks differ: {digests}"


def parameters_of(model: Any) -> Any:
    """Return a copy of all of a model's parameters in one vector."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def make_cnn(dtype: Any = torch.float32, seed: int = 3) -> Any:
    """Return a small network in which shards of a batch train like the whole (no batch norm)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 10),
    ).to(dtype)


def whole_batch(step: int, dtype: Any = torch.float32, size: int = 24) -> tuple[Any, Any]:
    """Return the images and labels of one step, for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    images = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (size,), generator=generator)
    return images.to(dtype), labels


def train(
    model: Any,
    optimizer: Any,
    steps: Iterable[int],
    rank: int = 0,
    size: int = 1,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """Train on this rank's shards of the batches of some steps."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        images, labels = whole_batch(step, dtype)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rank::size]), labels[rank::size])
        loss.backward()
        before_step()
        optimizer.step()


def saved(value: Any) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def simulate(
    model: Any,
    optimizer: Any,
    loss: Callable[[Any, int, int], Any],
    steps: Iterable[int],
    size: int,
    divisor: float | None = None,
) -> None:
    """Train in one process as `size` ranks would: by the mean of the gradients of all losses.

    Args:
        loss: of the model, the step and the rank; None for a rank that has no loss.
        divisor: of the sum of gradients; the number of ranks if None.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        losses = [value for r in range(size) if (value := loss(model, step, r)) is not None]
        used = [p for p in parameters if p.requires_grad]
        gradients = [torch.autograd.grad(value, used, allow_unused=True) for value in losses]
        for parameter in parameters:
            parameter.grad = None
        for parameter, parts in zip(used, zip(*gradients, strict=True), strict=True):
            there = [part for part in parts if part is not None]
            if there:
                parameter.grad = sum(there) / (size if divisor is None else divisor)
        optimizer.step()


class Branches(nn.Module):  # type: ignore[misc, name-defined]
    """A trunk with two branches, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.trunk = nn.Linear(4, 5)
        self.a = nn.Linear(5, 3)
        self.b = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3))
        self.unused = nn.Linear(2, 2)
        self.to(torch.float64)

    def forward(self, inputs: Any, branch: str) -> Any:
        hidden = torch.tanh(self.trunk(inputs))
        if branch == "both":
            return self.a(hidden) + self.b(hidden)
        return (self.a if branch == "a" else self.b)(hidden)


def inputs_of(step: int, rank: int, shape: Any = (6, 4), dtype: Any = torch.float64) -> Any:
    """Return the data of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=dtype)


def branch_loss(choose: Callable[[int, int], str]) -> Callable[[Any, int, int], Any]:
    """Return a loss for `Branches` in which step and rank choose the branch."""

    def loss(model: Any, step: int, rank: int) -> Any:
        return model(inputs_of(step, rank), choose(step, rank)).square().sum()

    return loss


def make_sgd(model: Any) -> Any:
    """Return an SGD in which a made-up zero gradient would show."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def make_adamw(model: Any) -> Any:
    """Return an AdamW in which a made-up zero gradient would show."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def compare_with_one_process(
    hvd: Any,
    world: Any,
    comm: Any,
    make_model: Callable[[], Any],
    make_optimizer: Callable[[Any], Any],
    loss: Callable[[Any, int, int], Any],
    steps: int = 5,
    **options: Any,
) -> tuple[Any, Any]:
    """Train distributed and in one process, and compare the weights after every step."""
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), **options)
    plain = make_optimizer(alone)
    divisor = 1 if options.get("op") == hvd.Sum else None
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, step, world.rank)
        if value is not None:
            value.backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size, divisor)
        dtype = next(model.parameters()).dtype
        tolerance = 1e-11 if dtype == torch.float64 else 1e-5
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", tolerance)
        assert_same_on_all_ranks(comm, model.parameters())
    return model, optimizer
