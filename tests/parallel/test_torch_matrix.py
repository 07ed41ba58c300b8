"""Every optimizer with every option ends where one process with the whole batch does.

The one process is this one, with the plain optimizer and all data: float64, to 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    digest,
    parameters_of,
)

nn = torch.nn
F64 = torch.float64
STEPS = 3
ROWS = 24  # divides by every number of ranks, and the shards by the number of passes

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    # With longer steps it multiplies rounding errors by millions on this problem, also alone.
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=4),
}


@dataclass(frozen=True)
class Option:
    """How to train, alone and distributed."""

    arguments: tuple[tuple[str, Any], ...] = ()
    passes: int = 1
    by_lists: bool = False
    clip: float | None = None
    branches: bool = False
    channels_last: bool = False


OPTIONS = {
    "plain": Option(),
    "accumulation": Option(passes=2),
    "predivide": Option((("gradient_predivide_factor", 3.0),)),
    "groups": Option((("groups", 2),)),
    "lists": Option(by_lists=True),
    "clipping": Option(clip=0.02),
    "branches": Option(branches=True),
    "channels_last": Option(channels_last=True),
    "all": Option(
        (("gradient_predivide_factor", 0.5),),
        passes=2,
        by_lists=True,
        clip=0.02,
        branches=True,
        channels_last=True,
    ),
}


class Net(nn.Module):
    """Convolutions, and two heads of which a rank may use one only."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 6, 3, stride=2)
        self.a = nn.Linear(6 * 2 * 2, 5)
        self.b = nn.Sequential(nn.Linear(6 * 2 * 2, 3), nn.Tanh(), nn.Linear(3, 5))
        self.to(F64)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images: Any, head: str) -> Any:
        hidden = torch.tanh(self.second(torch.tanh(self.first(images)))).flatten(1)
        if head == "both":
            return self.a(hidden) + self.b(hidden)
        return self.a(hidden) if head == "a" else self.b(hidden)


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _batch(step: int, channels_last: bool) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(500 + step)
    images = torch.randn(ROWS, 3, 7, 7, generator=generator, dtype=F64)
    labels = torch.randint(5, (ROWS,), generator=generator)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    return images, labels


def _head(option: Option, step: int, rank: int) -> str:
    return "ab"[(step + rank) % 2] if option.branches else "both"


def _loss(forward: Any, option: Option, step: int, rank: int, size: int, part: slice) -> Any:
    images, labels = _batch(step, option.channels_last)
    images, labels = images[rank::size][part], labels[rank::size][part]
    return nn.functional.cross_entropy(forward(images, _head(option, step, rank)), labels)


def _take_step(optimizer: Any, model: Any, backward: Any, clip: float | None) -> None:
    distributed = hasattr(optimizer, "synchronize")

    def evaluate() -> Any:
        optimizer.zero_grad()
        loss = backward()
        if clip is not None:
            if distributed:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(evaluate)
        return
    evaluate()
    if clip is not None and distributed:
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


def _train_alone(make_optimizer: Any, option: Option, size: int, norms: list[float]) -> Any:
    model = Net(option.channels_last)
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):

        def backward(step: int = step) -> Any:
            whole = slice(None)
            if option.branches:
                losses = [_loss(model, option, step, r, size, whole) for r in range(size)]
                loss = sum(losses) / size
            else:
                loss = _loss(model, option, step, 0, 1, whole)
            loss.backward()
            used = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(used)))
            return loss.detach()

        _take_step(optimizer, model, backward, option.clip)
    return model


def _compare(hvd, world, comm, name, option, model=None, forward=None) -> None:
    model = Net(option.channels_last) if model is None else model
    forward = model if forward is None else forward
    start = digest(model.parameters())
    arguments = dict(option.arguments)
    if option.by_lists:
        arguments["groups"] = [
            [model.first.weight, model.a.weight, model.b[2].bias],
            [model.second.bias, model.first.bias],
        ]
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=option.passes,
        **arguments,
    )
    for step in range(STEPS):

        def backward(step: int = step) -> Any:
            total = 0.0
            for i in range(option.passes):
                part = slice(i, None, option.passes)
                loss = _loss(forward, option, step, world.rank, world.size, part) / option.passes
                loss.backward()
                total += loss.detach()
            return total

        _take_step(optimizer, model, backward, option.clip)
    norms: list[float] = []
    alone = _train_alone(OPTIMIZERS[name], option, world.size, norms)
    for (what, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(mine.detach(), other.detach(), what, 1e-10)
        assert mine.stride() == other.stride()
    assert (parameters_of(model) - parameters_of(Net())).abs().max() > 1e-5, "nothing was learned"
    assert digest(model.parameters()) != start
    if option.clip is not None:
        assert max(norms) > option.clip, "nothing was clipped"
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("choice", OPTIONS)
def test_like_one_process(hvd, world, comm, name, choice):
    option = OPTIONS[choice]
    if name == "LBFGS":  # PyTorch's own views gradients as vectors, which these are not
        option = replace(option, channels_last=False)
    _compare(hvd, world, comm, name, option)


@pytest.mark.np(2, 3)
@pytest.mark.limit(120)
def test_compiled(hvd, world, comm):
    # Compiled once: only the weights and the optimizer are new each time.
    model = Net()
    forward = torch.compile(model, backend="aot_eager")
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    option = replace(OPTIONS["accumulation"], branches=True)
    for name in OPTIMIZERS:
        model.load_state_dict(fresh)
        model.zero_grad()
        _compare(hvd, world, comm, name, option, model, forward)
