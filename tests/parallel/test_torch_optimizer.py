"""DistributedOptimizer: every step takes the mean gradient of all ranks (B1 to B3).

What is expected comes from `simulate`: one process that averages the gradients of all ranks.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    branch_loss,
    compare_with_one_process,
    inputs_of,
    make_adamw,
    make_cnn,
    make_sgd,
    parameters_of,
    simulate,
    train,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


# -- gradients that are there on some ranks only --------------------------------------------

CHOICES = {
    "one branch": lambda step, rank: "a",
    "by rank": lambda step, rank: "ab"[rank % 2],
    "by step": lambda step, rank: "ab"[step % 2],
    "by both": lambda step, rank: ("a", "b", "both")[(step + rank) % 3],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 200])
def test_branches(hvd, world, comm, choice, bucket_bytes):
    model, _ = compare_with_one_process(
        hvd,
        world,
        comm,
        Branches,
        make_adamw,
        branch_loss(CHOICES[choice]),
        bucket_bytes=bucket_bytes,
    )
    assert all(p.grad is None for p in model.unused.parameters())
    for before, after in zip(
        Branches().unused.parameters(), model.unused.parameters(), strict=True
    ):
        assert torch.equal(before, after)


def test_a_rank_without_any_gradient(hvd, world, comm):
    branch = branch_loss(lambda step, rank: "both")

    def loss(model, step, rank):
        idle = world.size > 1 and (step + rank) % world.size == 0
        return None if idle else branch(model, step, rank)

    compare_with_one_process(hvd, world, comm, Branches, make_sgd, loss)


def test_layers_are_ready_in_another_order_on_each_rank(hvd, world, comm):
    class Terms(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(8)).to(F64)

    def loss(model, step, rank):
        # Autograd runs the last one created first.
        order = torch.randperm(8, generator=torch.Generator().manual_seed(10 * step + rank))
        return sum(model.layers[i](inputs_of(step, rank)).square().sum() for i in order.tolist())

    compare_with_one_process(hvd, world, comm, Terms, make_sgd, loss, bucket_bytes=1)


def test_sum_and_predivide(hvd, world, comm):
    loss = branch_loss(lambda step, rank: "both")
    compare_with_one_process(hvd, world, comm, Branches, make_sgd, loss, op=hvd.Sum)
    compare_with_one_process(
        hvd, world, comm, Branches, make_adamw, loss, gradient_predivide_factor=4.0
    )
    for options in ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"op": hvd.Max}):
        with pytest.raises(ValueError, match="op"):
            hvd.DistributedOptimizer(make_sgd(Branches()), **options)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(hvd, world, comm, name):
    model, alone = make_cnn(), make_cnn()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), compression=getattr(hvd.Compression, name)
    )
    train(model, optimizer, range(5), world.rank, world.size)
    train(alone, make_sgd(alone), range(5))
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-2)
    assert_same_on_all_ranks(comm, model.parameters())
    # A flag for "no gradient anywhere" survives the compression.
    branches = Branches().float()
    optimizer = hvd.DistributedOptimizer(
        make_adamw(branches), compression=getattr(hvd.Compression, name)
    )
    branches(inputs_of(0, world.rank, dtype=torch.float32), "ab"[world.rank % 2]).sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in branches.unused.parameters())
    assert all(p.grad is not None for p in branches.a.parameters())
    assert_same_on_all_ranks(comm, branches.parameters())


# -- tensors of all kinds -------------------------------------------------------------------


def test_channels_last(hvd, world, comm):
    def make():
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(F64)
        return layers.to(memory_format=torch.channels_last)

    def loss(model, step, rank):
        images = inputs_of(step, rank, (2, 3, 8, 8)).to(memory_format=torch.channels_last)
        return model(images).square().mean()

    model, _ = compare_with_one_process(hvd, world, comm, make, make_sgd, loss)
    for parameter in (model[0].weight, model[2].weight):
        assert parameter.is_contiguous(memory_format=torch.channels_last)
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.np(2, 3)
def test_memory_formats_that_differ_between_ranks(hvd, world, comm):
    def make():
        torch.manual_seed(2)
        model = nn.Conv2d(3, 4, 3).to(F64)
        return model.to(memory_format=torch.channels_last) if world.rank == 1 else model

    def loss(model, step, rank):
        return model(inputs_of(step, rank, (2, 3, 6, 6))).square().mean()

    compare_with_one_process(hvd, world, comm, make, make_sgd, loss)


def test_strided_scalar_empty_and_complex_parameters(hvd, world, comm):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.transposed = nn.Parameter(torch.randn(3, 4, dtype=F64).t())
            self.column = nn.Parameter(torch.randn(4, 6, dtype=F64)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(0.5, dtype=F64))
            self.empty = nn.Parameter(torch.empty(0, 3, dtype=F64))
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def loss(model, step, rank):
        x = inputs_of(step, rank, (4, 3))
        real = (model.transposed + model.column * x).square().sum() * model.scalar
        return real + model.empty.sum() + (model.complex * x.sum(0)).abs().square().sum()

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model, alone = Odd(), Odd()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), model.named_parameters())
    plain = plain_sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(mine.detach(), other.detach(), name, 1e-11)
            assert mine.stride() == other.stride()


def test_types_mixed_in_one_model(hvd, world, comm):
    def make():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].to(F64)
        model[1].to(torch.bfloat16)
        return model

    model, alone = make(), make()

    def loss(model, step, rank):
        x = inputs_of(step, rank)
        for layer in model:
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer = hvd.DistributedOptimizer(plain_sgd(model), model.named_parameters())
    plain = plain_sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        tolerance = 3e-2 if mine.dtype == torch.bfloat16 else 1e-2
        assert_close(mine.detach(), other.detach(), tolerance=tolerance)
    assert_same_on_all_ranks(comm, model.parameters())


def test_tied_weights(hvd, world, comm):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.encode = nn.Linear(4, 4, bias=False).to(F64)
            self.decode = nn.Linear(4, 4, bias=False).to(F64)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(torch.tanh(self.encode(x)))

    compare_with_one_process(
        hvd,
        world,
        comm,
        Tied,
        make_sgd,
        lambda m, step, rank: m(inputs_of(step, rank)).square().sum(),
    )


def test_frozen_and_unfrozen_layers(hvd, world, comm):
    def make():
        model = Branches()
        model.trunk.requires_grad_(False)
        return model

    model, alone = make(), make()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), bucket_bytes=100
    )
    plain = make_sgd(alone)
    loss = branch_loss(lambda step, rank: "both")
    changes = {
        2: lambda m: m.trunk.requires_grad_(True),
        4: lambda m: m.a.requires_grad_(False),
        6: lambda m: m.a.requires_grad_(True),
    }
    for step in range(8):
        for each in (model, alone):
            changes.get(step, lambda m: None)(each)
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


def test_add_param_group(hvd, world, comm):
    def make(model):
        return torch.optim.SGD(model.trunk.parameters(), lr=0.01, momentum=0.9, weight_decay=0.2)

    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters())
    plain = make(alone)
    loss = branch_loss(lambda step, rank: "a")
    for step in range(6):
        if step == 2:
            for each, opt in ((model, optimizer), (alone, plain)):
                opt.add_param_group({"params": each.a.parameters(), "lr": 0.05})
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
    added = optimizer.param_groups[1]
    assert (added["lr"], added["momentum"], added["weight_decay"]) == (0.05, 0.9, 0.2)
