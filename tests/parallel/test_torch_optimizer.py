"""DistributedOptimizer: gradients of all ranks in every step, whatever the ranks do.

What is expected comes from `simulate`: one process that averages the gradients of all ranks.
Rows B1 to B3, B6, B8, B13, B14, B17, B19, B25, B26.
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    digest,
    make_cnn,
    parameters_of,
    simulate,
    train,
    whole_batch,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


class Branches(nn.Module):
    """A trunk with two branches, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.trunk = nn.Linear(4, 5)
        self.a = nn.Linear(5, 3)
        self.b = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3))
        self.unused = nn.Linear(2, 2)
        self.to(F64)

    def forward(self, inputs, branch):
        hidden = torch.tanh(self.trunk(inputs))
        return {"a": self.a, "b": self.b, "both": lambda h: self.a(h) + self.b(h)}[branch](hidden)


def _inputs(step, rank, shape=(6, 4), dtype=F64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=dtype)


def _branch_loss(choose):
    def loss(model, step, rank):
        return model(_inputs(step, rank), choose(step, rank)).square().sum()

    return loss


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _compare(hvd, world, comm, make_model, make_optimizer, loss, steps=5, **options):
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
        tolerance = 1e-11 if dtype == F64 else 1e-5
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", tolerance)
        assert_same_on_all_ranks(comm, model.parameters())
    return model, optimizer


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
    model, _ = _compare(
        hvd,
        world,
        comm,
        Branches,
        _adamw,
        _branch_loss(CHOICES[choice]),
        bucket_bytes=bucket_bytes,
    )
    assert all(p.grad is None for p in model.unused.parameters())
    for before, after in zip(
        Branches().unused.parameters(), model.unused.parameters(), strict=True
    ):
        assert torch.equal(before, after)


def test_a_rank_without_any_gradient(hvd, world, comm):
    branch = _branch_loss(lambda step, rank: "both")

    def loss(model, step, rank):
        idle = world.size > 1 and (step + rank) % world.size == 0
        return None if idle else branch(model, step, rank)

    _compare(hvd, world, comm, Branches, _sgd, loss)


def test_layers_are_ready_in_another_order_on_each_rank(hvd, world, comm):
    class Terms(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(8)).to(F64)

    def loss(model, step, rank):
        # Autograd runs the last one created first.
        order = torch.randperm(8, generator=torch.Generator().manual_seed(10 * step + rank))
        return sum(model.layers[i](_inputs(step, rank)).square().sum() for i in order.tolist())

    _compare(hvd, world, comm, Terms, _sgd, loss, bucket_bytes=1)


def test_sum_and_predivide(hvd, world, comm):
    loss = _branch_loss(lambda step, rank: "both")
    _compare(hvd, world, comm, Branches, _sgd, loss, op=hvd.Sum)
    _compare(hvd, world, comm, Branches, _adamw, loss, gradient_predivide_factor=4.0)
    for options in ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"op": hvd.Max}):
        with pytest.raises(ValueError, match="op"):
            hvd.DistributedOptimizer(_sgd(Branches()), **options)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(hvd, world, comm, name):
    model, alone = make_cnn(), make_cnn()
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), model.named_parameters(), compression=getattr(hvd.Compression, name)
    )
    train(model, optimizer, range(5), world.rank, world.size)
    train(alone, _sgd(alone), range(5))
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-2)
    assert_same_on_all_ranks(comm, model.parameters())
    # A flag for "no gradient anywhere" survives the compression.
    branches = Branches().float()
    optimizer = hvd.DistributedOptimizer(
        _adamw(branches), compression=getattr(hvd.Compression, name)
    )
    branches(_inputs(0, world.rank, dtype=torch.float32), "ab"[world.rank % 2]).sum().backward()
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
        images = _inputs(step, rank, (2, 3, 8, 8)).to(memory_format=torch.channels_last)
        return model(images).square().mean()

    model, _ = _compare(hvd, world, comm, make, _sgd, loss)
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
        return model(_inputs(step, rank, (2, 3, 6, 6))).square().mean()

    _compare(hvd, world, comm, make, _sgd, loss)


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
        x = _inputs(step, rank, (4, 3))
        real = (model.transposed + model.column * x).square().sum() * model.scalar
        return real + model.empty.sum() + (model.complex * x.sum(0)).abs().square().sum()

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model, alone = Odd(), Odd()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
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
        x = _inputs(step, rank)
        for layer in model:
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
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

    _compare(
        hvd, world, comm, Tied, _sgd, lambda m, step, rank: m(_inputs(step, rank)).square().sum()
    )


def test_frozen_and_unfrozen_layers(hvd, world, comm):
    def make():
        model = Branches()
        model.trunk.requires_grad_(False)
        return model

    model, alone = make(), make()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), bucket_bytes=100)
    plain = _sgd(alone)
    loss = _branch_loss(lambda step, rank: "both")
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
    loss = _branch_loss(lambda step, rank: "a")
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


# -- zero_grad, passes, synchronize ---------------------------------------------------------


@pytest.mark.parametrize("how", ["default", "none", "zeros", "model", "by hand", "mixed"])
def test_zero_grad(hvd, world, comm, how):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    plain = _sgd(alone)

    def clear(step):
        if how == "model":
            model.zero_grad()
        elif how == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        elif how == "mixed":
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        else:
            arguments = {"default": {}, "none": {"set_to_none": True}}
            optimizer.zero_grad(**arguments.get(how, {"set_to_none": False}))

    loss = _branch_loss(lambda step, rank: "both")
    for step in range(5):
        clear(step)
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


def test_gradients_replaced_by_user_code(hvd, world):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    plain = _sgd(alone)
    loss = _branch_loss(lambda step, rank: "a")
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(model, step, world.rank).backward()
        optimizer.synchronize()
        for parameter in model.trunk.parameters():
            if step % 3 == 0:
                parameter.grad.data = parameter.grad.data * 1.0  # old-fashioned
            elif step % 3 == 1:
                parameter.grad = parameter.grad.clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


def test_gradients_that_are_never_cleared_accumulate(hvd, world, comm):
    # As in one process: what was averaged before counts in full.
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    plain = _sgd(alone)
    total = [torch.zeros_like(p) for p in alone.parameters()]
    for step in range(3):
        model(_inputs(step, world.rank), "both").square().sum().backward()
        optimizer.step()
        for rank in world.ranks:
            value = alone(_inputs(step, rank), "both").square().sum() / world.size
            gradients = torch.autograd.grad(value, list(alone.parameters()), allow_unused=True)
            for summed, gradient in zip(total, gradients, strict=True):
                summed += 0 if gradient is None else gradient
        for parameter, summed in zip(alone.parameters(), total, strict=True):
            parameter.grad = summed.clone()
        for parameter in alone.unused.parameters():
            parameter.grad = None
        plain.step()
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


@pytest.mark.parametrize("changed", [False, True])
def test_backward_passes_per_step(hvd, world, comm, changed):
    # The rule: passes accumulate as a sum, as without hvdlite; then the ranks average.
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), model.named_parameters(), backward_passes_per_step=1 if changed else 2
    )
    if changed:
        train(model, optimizer, [50], world.rank, world.size)
        train(alone, plain := _sgd(alone), [50])
        optimizer.set_backward_passes_per_step(2)
    else:
        plain = _sgd(alone)
    for step in range(4):
        images, labels = whole_batch(step, F64)
        optimizer.zero_grad()
        shard = images[world.rank :: world.size], labels[world.rank :: world.size]
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loss = nn.functional.cross_entropy(model(shard[0][half]), shard[1][half])
            (loss / 2).backward()
        optimizer.step()
        train(alone, plain, [step])
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-10)
    assert_same_on_all_ranks(comm, model.parameters())
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            optimizer.set_backward_passes_per_step(wrong)


def test_a_step_before_all_passes(hvd, world, comm):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(
        _sgd(model), model.named_parameters(), backward_passes_per_step=3
    )
    plain = _sgd(alone)
    loss = _branch_loss(lambda step, rank: "ab"[rank % 2])
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


@pytest.mark.np(2, 3)
def test_too_many_passes(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    for _ in range(2):  # before and after the buckets are agreed
        model(_inputs(0, world.rank), "a").sum().backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            model(_inputs(1, world.rank), "a").sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.np(2, 3)
def test_zero_grad_while_gradients_are_reduced(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    for _ in range(2):
        model(_inputs(0, world.rank), "a").sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="synchronize"):
            optimizer.set_backward_passes_per_step(2)
        optimizer.synchronize()
        optimizer.zero_grad()


def test_clipping(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    plain = _sgd(alone)
    norms = []

    def clip(which):
        norms.append(torch.nn.utils.clip_grad_norm_(which.parameters(), 0.1).item())

    for step in range(4):
        before = hvd.statistics().responses
        optimizer.zero_grad()
        images, labels = whole_batch(step, F64)
        images, labels = images[world.rank :: world.size], labels[world.rank :: world.size]
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.synchronize()
        clip(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        if step > 0 and world.size > 1:
            assert hvd.statistics().responses - before == 1  # one bucket, once
        train(alone, plain, [step], before_step=lambda: clip(alone))
        assert abs(norms[-2] - norms[-1]) < 1e-11
        assert len(set(comm.allgather(norms[-2]))) == 1
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-10)


def test_step_after_synchronize_warns_and_reduces_once(hvd, world, comm):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), op=hvd.Sum)
    plain = _sgd(alone)
    loss = _branch_loss(lambda step, rank: "a")
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.synchronize()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        simulate(alone, plain, loss, [step], world.size, divisor=1)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        loss(model, 9, world.rank).backward()
        optimizer.step()


@pytest.mark.np(2, 3)
def test_skipping_what_has_not_been_done(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    for _ in range(2):
        model(_inputs(0, world.rank), "a").sum().backward()
        with pytest.raises(RuntimeError, match="synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


# -- several optimizers ---------------------------------------------------------------------


def test_two_optimizers_with_a_common_backward(hvd, world, comm):
    def make():
        torch.manual_seed(8)
        return nn.Linear(3, 4).to(F64), nn.Linear(4, 1).to(F64)

    def optimizers(pair):
        return _adamw(pair[0]), _sgd(pair[1])

    mine, alone = make(), make()
    generator, critic = (
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for model, optimizer in zip(mine, optimizers(mine), strict=True)
    )
    plain_generator, plain_critic = optimizers(alone)

    def real(pair, step, rank):
        return pair[1](_inputs(step, rank, (5, 4))).square().mean()

    def fake(pair, step, rank):
        return pair[1](torch.tanh(pair[0](_inputs(step + 50, rank, (5, 3))))).mean()

    for step in range(4):
        critic.zero_grad()
        (real(mine, step, world.rank) + fake(mine, step, world.rank)).backward()
        critic.step()
        simulate(
            alone, plain_critic, lambda p, s, r: real(p, s, r) + fake(p, s, r), [step], world.size
        )
        generator.synchronize()  # what the critic's loss left here is stale
        generator.zero_grad()
        critic.zero_grad()
        fake(mine, step, world.rank).neg().backward()
        generator.step()
        simulate(alone, plain_generator, lambda p, s, r: -fake(p, s, r), [step], world.size)
        critic.synchronize()
        critic.zero_grad()
        for one, other in zip(mine, alone, strict=True):
            assert_close(parameters_of(one), parameters_of(other), f"step {step}", 1e-11)


def test_an_optimizer_that_replaces_another(hvd, world, comm):
    model = Branches()
    first = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    model(_inputs(0, world.rank), "a").sum().backward()
    first.step()
    first.zero_grad()
    second = hvd.DistributedOptimizer(_adamw(model), model.named_parameters())
    model(_inputs(1, world.rank), "both").sum().backward()
    if world.size > 1:
        with pytest.raises(RuntimeError, match="another DistributedOptimizer"):
            first.step()
    second.step()
    assert_same_on_all_ranks(comm, model.parameters())
    del first, second
    # With nobody left to reduce them gradients stay as they are: no hook remains.
    model.zero_grad()
    for _ in range(2):
        model(_inputs(world.rank, world.rank), "both").sum().backward()


# -- names ----------------------------------------------------------------------------------


def test_names_are_checked(hvd, world):
    model = Branches()
    named = list(model.named_parameters())
    wrong = {
        "duplicate": [*named, ("a.bias", nn.Parameter(torch.ones(1)))],
        "lacks 1": named[1:],
        "tuples": [parameter for _, parameter in named],
        r"\(name, parameter\)": [(parameter, name) for name, parameter in named],
    }
    for message, value in wrong.items():
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(_sgd(model), named_parameters=value)
    with pytest.raises(TypeError, match="Optimizer"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(_sgd(model)))
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=0)
    hvd.DistributedOptimizer(_sgd(model), named_parameters=dict(named))


@pytest.mark.np(2, 3)
def test_names_and_not_positions_identify_parameters(hvd, world, comm):
    # Equal shapes in another order on each rank: by position the wrong ones would be averaged.
    layers = {name: nn.Linear(4, 4).to(F64) for name in "abcd"}
    order = "abcd" if world.rank == 0 else "dcba"
    torch.manual_seed(9)
    for name in "abcd":
        nn.init.normal_(layers[name].weight)
    model = nn.ModuleDict({name: layers[name] for name in order})
    prefix = "module._orig_mod." if world.rank == 1 else ""
    before = {name: layers[name].weight.detach().clone() for name in order}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        [(prefix + name, parameter) for name, parameter in model.named_parameters()],
    )
    scale = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
    loss = sum(scale[name] * (world.rank + 1) * layer.weight.sum() for name, layer in model.items())
    loss.backward()
    optimizer.step()
    mean = sum(rank + 1 for rank in world.ranks) / world.size
    for name in order:
        assert_close(layers[name].weight.detach(), before[name] - scale[name] * mean)


@pytest.mark.np(2, 3)
def test_parameters_that_differ_between_ranks(hvd, world, comm):
    cases = {
        "'1.bias'": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=world.rank != 1)),
        "shape": nn.Linear(2, 3 if world.rank == 1 else 2),
        "float64": nn.Linear(2, 2).to(F64 if world.rank == 1 else torch.float32),
    }
    for words, model in cases.items():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        dtype = next(model.parameters()).dtype
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        with pytest.raises(hvd.MismatchError, match=f"^Mismatched .*{words}") as caught:
            optimizer.step()
        assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
        assert len(set(comm.allgather(str(caught.value)))) == 1


# -- sparse gradients -----------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(10)
        self.embedding = nn.Embedding(12, 3, sparse=sparse)
        self.late = nn.Embedding(5, 3, sparse=sparse)
        self.out = nn.Linear(3, 1)
        self.to(F64)


def _tokens_loss(size):
    def loss(model, step, rank):
        value = model.out(_inputs(step, rank, (2, 3))).square().sum()
        if rank == size - 1 and size > 1 and step % 2:
            return value  # a rank that sees no tokens
        tokens = torch.tensor([rank, 3, 3, 5 + step, rank])
        value = value + (model.embedding(tokens) * _inputs(step, rank, (5, 3))).sum()
        if step >= 2 and rank == 0:
            value = value + (model.late(torch.tensor([1, 4, 4])) ** 2).sum()
        return value

    return loss


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_gradients(hvd, world, comm, op):
    size = world.size
    divisor = size if op == "Average" else 1

    def optimizers(model):
        tables = [model.embedding.weight, model.late.weight]
        return torch.optim.SparseAdam(tables, lr=0.1), _sgd(model.out)

    model, alone = Words(sparse=True), Words(sparse=True)
    names = dict(model.named_parameters())
    mine = [hvd.DistributedOptimizer(o, names, op=getattr(hvd, op)) for o in optimizers(model)]
    plain = optimizers(alone)
    loss = _tokens_loss(size)
    for step in range(5):
        for optimizer in mine:
            optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        for optimizer in mine:
            optimizer.step()
        for parameter in alone.parameters():
            parameter.grad = None
        sum(loss(alone, step, rank) for rank in world.ranks).div(divisor).backward()
        for optimizer in plain:
            optimizer.step()
        for (name, one), two in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(one.detach(), two.detach(), f"step {step}: {name}", 1e-11)
        assert (model.late.weight.grad is None) == (step < 2)
        gradient = model.embedding.weight.grad
        assert gradient is None or gradient.is_sparse
        assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.parametrize("kind", ["sparse_as_dense", "SGD"])
def test_sparse_as_dense_gives_the_same_weights(hvd, world, comm, kind):
    model, alone = Words(sparse=True), Words(sparse=False)

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer = hvd.DistributedOptimizer(
        make_sgd(model),
        model.named_parameters(),
        sparse_as_dense=kind == "sparse_as_dense",
    )
    plain = make_sgd(alone)
    loss = _tokens_loss(world.size)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
        assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("late", [False, True])
def test_sparse_on_one_rank_and_dense_on_another(hvd, world, comm, late):
    def make(sparse):
        torch.manual_seed(11)
        return nn.ModuleDict(
            {"table": nn.Embedding(6, 2, sparse=sparse), "out": nn.Linear(2, 1)}
        ).to(F64)

    def loss(model, step, rank):
        value = model["out"](_inputs(step, rank, (2, 2))).square().sum()
        if late and step == 0:
            return value
        tokens = torch.tensor([rank, 2, step, 2])
        return value + (model["table"](tokens) ** 2).sum()

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, alone = make(sparse=world.rank == 0), make(sparse=False)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


# -- buckets --------------------------------------------------------------------------------


@pytest.mark.np(2)
def test_buckets_never_show_in_the_numbers(hvd, world, comm):
    sizes = torch.randint(1, 400, (300,), generator=torch.Generator().manual_seed(26)).tolist()
    sizes[11] = 5001

    def run(**options):
        torch.manual_seed(12)
        parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
        if options.get("groups") == "lists":
            options["groups"] = [parameters[10:20], parameters[100:103]]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            weights = torch.randn(sum(sizes), generator=generator)
            (torch.cat(parameters) * weights).sin().sum().backward()
            optimizer.step()
        return digest(parameters)

    exact = 4 * sum(sizes[-10:])
    results = {
        run(**options)
        for options in (
            {"bucket_bytes": 0},
            {"bucket_bytes": 1},
            {"bucket_bytes": exact},
            {"bucket_bytes": 4 * 5000},
            {"bucket_bytes": 64 << 20},
            {"num_groups": 1},
            {"groups": 7},
            {"groups": "lists"},
            {},
        )
    }
    assert len(results) == 1


def test_groups_are_checked(hvd, world):
    model = Branches()
    one = list(model.parameters())
    for wrong in (-1, "text", [one[0]], [[1, 2]], [[one[0]], [one[0]]]):
        with pytest.raises(ValueError, match="group"):
            hvd.DistributedOptimizer(_sgd(model), groups=wrong)


def test_gradients_live_in_few_buffers(hvd, world):
    if world.size == 1:
        pytest.skip("one rank has nothing to reduce")
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    addresses = []
    for step in range(3):
        train(model, optimizer, [step], world.rank, world.size)
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert len(storages) == 1
    assert addresses[0] == addresses[1] == addresses[2]


def test_joined_ranks(hvd, world, comm):
    # Rank r has r + 2 batches. Who has joined contributes zeros; averages divide by all.
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    plain = _sgd(alone)
    branch = _branch_loss(lambda step, rank: "a")
    for step in range(world.rank + 2):
        optimizer.zero_grad()
        branch(model, step, world.rank).backward()
        optimizer.step()
    assert hvd.join() in world.ranks
    mine = world.rank + 2
    simulate(
        alone,
        plain,
        lambda model, step, rank: branch(model, step, rank) if step < rank + 2 else None,
        range(mine),
        world.size,
    )
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-11)
