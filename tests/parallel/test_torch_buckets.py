"""How gradients are named, and which travel together (B19, B26)."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    digest,
    make_cnn,
    make_sgd,
    train,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


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
            hvd.DistributedOptimizer(make_sgd(model), named_parameters=value)
    with pytest.raises(TypeError, match="Optimizer"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(make_sgd(model)))
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=0)
    hvd.DistributedOptimizer(make_sgd(model), named_parameters=dict(named))


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
        with pytest.raises((TypeError, ValueError), match="group"):
            hvd.DistributedOptimizer(make_sgd(model), groups=wrong)


@pytest.mark.np(3)
def test_gradients_live_in_few_buffers(hvd, world):
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    addresses = []
    for step in range(3):
        train(model, optimizer, [step], world.rank, world.size)
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert len(storages) == 1
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.np(2, 4)
def test_gradients_are_reduced_where_backward_has_left_them(hvd, world):
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    left = {}
    for name, parameter in model.named_parameters():
        # Behind hvdlite's own hook.
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: left.__setitem__(name, p.grad.data_ptr())
        )
    for step in range(3):
        train(model, optimizer, [step], world.rank, world.size)
        if step:  # in the first one, nobody knows yet which gradients there are
            assert left == {name: p.grad.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.np(2, 3, 4)
def test_gradients_that_share_memory(hvd, world):
    one, other = (torch.nn.Parameter(torch.ones(60)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one, other], lr=1.0), [("one", one), ("other", other)], op=hvd.Sum
    )
    total = sum(world.ranks) + world.size
    for step in range(3):
        optimizer.zero_grad()
        # Both gradients are parts of the one of what is concatenated...
        factors = torch.arange(120.0) * (world.rank + 1)
        (torch.cat([one, other]) * factors).sum().backward()
        optimizer.synchronize()
        assert torch.equal(one.grad, torch.arange(60.0) * total), step
        assert torch.equal(other.grad, torch.arange(60.0, 120.0) * total), step
        optimizer.zero_grad()
        # ... or both are the same memory, seen in two ways.
        shared = torch.arange(60.0) * (world.rank + 1)
        torch.autograd.backward(
            [one.view(6, 10), other.view(10, 6)], [shared.view(6, 10), shared.view(10, 6)]
        )
        optimizer.synchronize()
        assert torch.equal(one.grad, torch.arange(60.0) * total), step
        assert torch.equal(other.grad, torch.arange(60.0) * total), step


@pytest.mark.np(2, 3, 4)
def test_gradients_with_a_graph_of_their_own(hvd, world):
    weight = torch.nn.Parameter(torch.full((50,), 2.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], op=hvd.Sum
    )
    kept = []
    weight.register_hook(kept.append)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (weight.pow(3) * (world.rank + 1)).sum()
        loss.backward(create_graph=True)
        optimizer.synchronize()
        assert torch.equal(weight.grad, torch.full((50,), 12.0 * (sum(world.ranks) + world.size)))
        # This rank's own gradient is as it was, and so is what it depends on.
        mine = kept.pop()
        assert torch.equal(mine, torch.full((50,), 12.0 * (world.rank + 1)))
        (second,) = torch.autograd.grad(mine.sum(), weight)
        kept.clear()
        assert torch.equal(second, torch.full((50,), 12.0 * (world.rank + 1)))


@pytest.mark.np(2, 4)
def test_what_autograd_still_needs_is_not_written_to(hvd, world):
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), [("weight", weight)], op=hvd.Sum
    )
    given = torch.arange(40.0) + world.rank
    for _ in range(3):
        optimizer.zero_grad()
        weight.view(8, 5).backward(gradient=given.view(8, 5))
        optimizer.step()
        total = torch.arange(40.0) * world.size + sum(world.ranks)
        assert torch.equal(weight.grad, total)
        # The caller's own memory, of which autograd makes the gradient without a copy.
        assert torch.equal(given, torch.arange(40.0) + world.rank)


@pytest.mark.np(2, 3, 4)
def test_a_gradient_that_was_discarded_is_not_sent(hvd, world):
    used, unused = (torch.nn.Parameter(torch.ones(30)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, unused], lr=1.0),
        [("used", used), ("unused", unused)],
        op=hvd.Sum,
        backward_passes_per_step=2,
    )

    def passes(*, both):
        for _ in range(2):
            loss = used.sum() * (world.rank + 1)
            (loss + unused.sum() * 5 if both else loss).backward()

    optimizer.zero_grad()
    passes(both=True)
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        if world.rank == 0:  # a batch that is found to be bad
            (used.sum() * 100 + unused.sum() * 100).backward()
            optimizer.zero_grad()
        passes(both=world.rank > 0)
        optimizer.synchronize()
        assert torch.equal(used.grad, torch.full((30,), 2.0 * (sum(world.ranks) + world.size)))
        assert torch.equal(unused.grad, torch.full((30,), 10.0 * (world.size - 1)))


@pytest.mark.np(2, 3, 4)
def test_gradients_dropped_before_the_step(hvd, world):
    kept, dropped, unused = (torch.nn.Parameter(torch.ones(30)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([kept, dropped, unused], lr=1.0),
        [("kept", kept), ("dropped", dropped), ("unused", unused)],
        op=hvd.Sum,
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = kept.sum() + dropped.sum() * (1e30 if world.rank == 0 else 2.0)
        (loss + unused.sum() if step == 0 else loss).backward()
        if world.rank == 0 and step:
            dropped.grad = None
        optimizer.synchronize()
        if step:
            assert torch.equal(kept.grad, torch.full((30,), float(world.size)))
            assert torch.equal(dropped.grad, torch.full((30,), 2.0 * (world.size - 1)))


class Constant(torch.autograd.Function):
    """Something whose gradient is always the same memory, which is not torch's own."""

    memory = None

    @staticmethod
    def forward(ctx, tensor):
        return tensor.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(Constant.memory)


@pytest.mark.np(2, 3, 4)
def test_memory_of_others_is_not_written_to(hvd, world):
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), [("weight", weight)], op=hvd.Sum
    )
    mine = np.arange(40, dtype=np.float32) + world.rank
    Constant.memory = mine.copy()
    for _ in range(3):
        optimizer.zero_grad()
        Constant.apply(weight).backward()
        optimizer.step()
        total = torch.arange(40.0) * world.size + sum(world.ranks)
        assert torch.equal(weight.grad, total)
        np.testing.assert_array_equal(Constant.memory, mine)


@pytest.mark.np(2, 3, 4)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_one_gradient_of_two_parameters(hvd, world, bucket_bytes):
    one, other = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one, other], lr=1.0),
        [("one", one), ("other", other)],
        op=hvd.Sum,
        bucket_bytes=bucket_bytes,
    )
    for _ in range(3):
        optimizer.zero_grad()
        one.grad = other.grad = torch.arange(50.0) * (world.rank + 1)
        optimizer.synchronize()
        for parameter in (one, other):
            total = torch.arange(50.0) * (sum(world.ranks) + world.size)
            assert torch.equal(parameter.grad, total)


@pytest.mark.np(2, 4)
def test_a_gradient_that_was_moved_is_refused_and_its_neighbours_are_safe(hvd, world):
    moved, unused = (torch.nn.Parameter(torch.ones(30)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([moved, unused], lr=1.0), [("moved", moved), ("unused", unused)], op=hvd.Sum
    )
    (moved.sum() + unused.sum()).backward()
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        moved.sum().backward()
        around = torch.arange(60.0)
        moved.grad.data = around[::2]
        with pytest.raises(RuntimeError, match="moved"):
            optimizer.step()
        assert torch.equal(around[1::2], torch.arange(1.0, 60.0, 2.0))


@pytest.mark.np(2, 4)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda gradient: gradient.share_memory_(), "replaced"),
        (lambda gradient: gradient.resize_(10**6), "not resizable"),
        (lambda gradient: gradient.untyped_storage().resize_(0), "not resizable"),
    ],
    ids=["moved", "grown", "freed"],
)
def test_memory_stays_while_others_may_use_it(hvd, world, change, problem):
    weights = [torch.nn.Parameter(torch.zeros(5000)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
    total = float(sum(world.ranks) + world.size)
    for step in range(4):
        optimizer.zero_grad()
        sum(weight.sum() * (world.rank + 1) for weight in weights).backward()
        if step >= 2 and world.rank == 0:
            with pytest.raises(RuntimeError, match=problem):
                change(weights[1].grad)
                # What the heap hands out now must not be what the other ranks write to.
                torch.full((5000,), 7.0)
                optimizer.synchronize()
            if problem == "not resizable":
                optimizer.synchronize()
        else:
            optimizer.synchronize()
        if step < 2 or world.rank:
            for weight in weights:
                assert torch.equal(weight.grad, torch.full((5000,), total))
