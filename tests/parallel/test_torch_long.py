"""Two thousand steps of a network whose graph is another one in every step, on every rank."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402
from hvdlite import Handle  # noqa: E402
from hvdlite.world import engine  # noqa: E402

from .torch_helpers import assert_same_on_all_ranks, parameters_of  # noqa: E402

nn = torch.nn


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


class Forest(nn.Module):
    """Branches that may be used, in any order and more than once, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.words = nn.Embedding(50, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, words, path):
        hidden = self.words(words).mean(1)
        for i in path:
            hidden = hidden + torch.tanh(self.branches[i](hidden)) * self.gates[i]
        return self.head(hidden)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _live() -> dict[str, int]:
    gc.collect()
    statistics = hvdlite_torch.statistics()
    objects = gc.get_objects()
    return {
        "handles": sum(type(value) is Handle for value in objects),
        "tensors": sum(isinstance(value, torch.Tensor) for value in objects),
        "names": len(engine()._names),
        "cached": statistics.cache_size,
        "queued": statistics.queue_depth + statistics.in_flight,
    }


@pytest.mark.np(2, 4)
@pytest.mark.limit(180)
def test_random_graphs(hvd, world, comm):
    steps = 2000 if world.size == 2 else 200
    chance = random.Random(world.rank)  # every rank has its own
    common = random.Random(99)
    model = Forest()
    start = parameters_of(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        bucket_bytes=600,
        backward_passes_per_step=2,
    )
    middle: tuple[int, dict[str, int]] | None = None
    length = 1
    for step in range(steps):
        if step % 50 == 0:  # an epoch
            length = common.randint(1, 30)
            frozen = common.randrange(6)
            for i, branch in enumerate(model.branches):
                branch.requires_grad_(i != frozen)
        optimizer.zero_grad(set_to_none=common.random() < 0.8)
        for _ in range(chance.randint(0, 2)):  # also none, or one pass of two
            rows = chance.randint(1, 5)
            path = [chance.randrange(6) for _ in range(chance.randint(0, 4))]
            words = torch.randint(50, (rows, length))
            model(words, path).square().mean().backward()
        if common.random() < 0.2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if step == steps // 4:
            middle = (_resident_bytes(), _live())
    assert middle is not None
    grown = _resident_bytes() - middle[0]
    assert grown < 8 << 20, f"{grown / steps:.0f} bytes a step"
    live = _live()
    # A few tensors more or less are gradients that are None or not at that moment.
    assert abs(live.pop("tensors") - middle[1].pop("tensors")) < 40
    assert live == middle[1]
    assert live["queued"] == 0
    assert (parameters_of(model) - start).abs().max() > 0.01
    assert_same_on_all_ranks(comm, model.parameters())
    state = optimizer.state_dict()["state"]
    assert_same_on_all_ranks(comm, [state[i]["exp_avg_sq"] for i in sorted(state)])
