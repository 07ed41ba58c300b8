"""Backward passes that fail, that hold others, and optimizers that step in any order."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    branch_loss,
    compare_with_one_process,
    inputs_of,
    make_adamw,
    make_sgd,
    parameters_of,
    simulate,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


# -- activation checkpointing -----------------------------------------------------------------


class Checkpointed(nn.Module):
    """Segments that share a layer, which the part without checkpoints uses as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.first = nn.Linear(4, 5)
        self.shared = nn.Linear(5, 5)
        self.own = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 2)
        self.to(F64)

    def forward(self, inputs, reentrant, outside):
        hidden = torch.tanh(self.first(inputs))
        for layer in self.own:

            def segment(x, layer=layer):
                return torch.tanh(self.shared(torch.tanh(layer(x))))

            if reentrant is None:
                hidden = segment(hidden)
            else:
                hidden = checkpoint(segment, hidden, use_reentrant=reentrant)
        if outside:
            hidden = self.shared(hidden)
        return self.last(hidden)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_checkpoints_that_share_a_layer(hvd, world, comm, reentrant, outside, bucket_bytes):
    def loss(model, step, rank, reentrant=None):
        return model(inputs_of(step, rank), reentrant, outside).square().sum()

    model, alone = Checkpointed(), Checkpointed()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model),
        model.named_parameters(),
        bucket_bytes=bucket_bytes,
        backward_passes_per_step=2,
    )
    plain = make_sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        for part in (0, 100):
            loss(model, step + part, world.rank, reentrant).backward()
        optimizer.step()
        simulate(
            alone,
            plain,
            lambda m, s, r: loss(m, s, r) + loss(m, s + 100, r),
            [step],
            world.size,
        )
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_too_many_passes_are_still_seen(hvd, world, reentrant):
    model = Checkpointed()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        model(inputs_of(0, world.rank), reentrant, True).sum().backward()
        with pytest.raises(AssertionError, match=f"rank {world.rank}: .*backward_passes_per_step"):
            model(inputs_of(0, world.rank), reentrant, True).sum().backward()
        with pytest.raises(RuntimeError, match="were changed"):
            optimizer.step()
        optimizer.zero_grad()


# -- backward passes that fail ----------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Passes values on, and gradients not always."""

    fail = False

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        if Failing.fail:
            raise ZeroDivisionError("in backward")
        return gradient


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(22)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.to(F64)

    def forward(self, inputs, fails_at=None):
        for i, layer in enumerate(self.layers):
            if i == fails_at:
                inputs = Failing.apply(inputs)
            inputs = torch.tanh(layer(inputs))
        return inputs


@pytest.mark.parametrize("where", ["same", "by rank"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}])
def test_a_failed_backward_can_be_discarded(hvd, world, comm, where, set_to_none, options):
    model, alone = Deep(), Deep()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), **options)
    plain = make_sgd(alone)

    def loss(model, step, rank):
        return model(inputs_of(step, rank)).square().sum()

    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        if step % 2 == 0:
            # Some gradients are there, and under way, when the error comes.
            place = 2 if where == "same" else 1 + (world.rank + step) % 3
            Failing.fail = True
            try:
                with pytest.raises(ZeroDivisionError):
                    model(inputs_of(50 + step, world.rank), place).sum().backward()
            finally:
                Failing.fail = False
            optimizer.zero_grad(set_to_none=set_to_none)
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
        if world.size > 1:
            loss(model, step, world.rank).backward()
            with pytest.raises(AssertionError, match="synchronize"):
                optimizer.zero_grad()
            optimizer.synchronize()
            optimizer.zero_grad()
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("first", [0, 3])
def test_who_discards_alone_is_found_out(hvd, world, comm, first):
    # Rank 1 fails at the end of backward; the others know nothing of it.
    model = Deep()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), bucket_bytes=1)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs_of(step, world.rank)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    if world.rank == 1:
        if first == 0:  # after everything has been submitted
            hook = model.layers[0].weight.register_post_accumulate_grad_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                model(inputs_of(9, world.rank)).sum().backward()
            hook.remove()
        else:
            Failing.fail = True
            with pytest.raises(ZeroDivisionError):
                model(inputs_of(9, world.rank), 2).sum().backward()
            Failing.fail = False
        optimizer.zero_grad()
    else:
        model(inputs_of(9, world.rank)).sum().backward()
        if first:
            with pytest.raises(hvd.MismatchError, match=f"rank {world.rank}.*all have to"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    model(inputs_of(10, world.rank)).sum().backward()
    if first:
        optimizer.step()  # caught by those who stepped: all have skipped the same step
        assert_same_on_all_ranks(comm, model.parameters())
    else:
        with pytest.raises(hvd.MismatchError, match="all have to"):
            optimizer.step()


def _raise(_):
    raise ZeroDivisionError("in a hook")


# -- several optimizers -----------------------------------------------------------------------


@pytest.mark.np(2, 3, 4)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_optimizers_step_in_another_order_on_each_rank(hvd, world, comm, separate, bucket_bytes):
    models, alone = [Deep() for _ in range(3)], [Deep() for _ in range(3)]
    optimizers = [
        hvd.DistributedOptimizer(make_adamw(m), m.named_parameters(), bucket_bytes=bucket_bytes)
        for m in models
    ]
    plain = [make_adamw(m) for m in alone]

    def loss(model, step, rank):
        return model(inputs_of(step, rank)).square().sum()

    for step in range(4):
        order = [(i + world.rank + step) % 3 for i in range(3)]
        if world.rank == 1:
            order.reverse()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if separate:
            for i in order[1:] + order[:1]:
                loss(models[i], 10 * step + i, world.rank).backward()
        else:
            sum(loss(models[i], 10 * step + i, world.rank) for i in range(3)).backward()
        for i in order:
            optimizers[i].step()
        for i in range(3):
            simulate(alone[i], plain[i], loss, [10 * step + i], world.size)
            assert_close(parameters_of(models[i]), parameters_of(alone[i]), f"{step}", 1e-11)
            assert_same_on_all_ranks(comm, models[i].parameters())


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("what", ["allreduce", "barrier", "object"])
def test_collectives_before_or_after_the_first_step(hvd, world, comm, what):
    """As rank 0 steps first, and the others do so last, the agreement on buckets is between."""
    model, alone = Deep(), Deep()
    optimizer = hvd.DistributedOptimizer(make_adamw(model), model.named_parameters())
    plain = make_adamw(alone)

    def communicate():
        with torch.inference_mode():  # of which no bucket may take notice
            if what == "allreduce":
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [world.size] * 2
            elif what == "barrier":
                hvd.barrier()
            else:
                assert hvd.broadcast_object("metric", 0) == "metric"

    def loss(model, step, rank):
        return model(inputs_of(step, rank)).square().sum()

    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        if world.rank:
            communicate()
        optimizer.step()
        if not world.rank:
            communicate()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"{step}", 1e-11)
        assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2)
def test_leaving_between_the_first_backward_and_its_step(hvd, world, comm):
    for _ in range(3):
        model = Deep()
        optimizer = hvd.DistributedOptimizer(make_adamw(model), model.named_parameters())
        model(inputs_of(0, world.rank)).sum().backward()
        hvd.shutdown()
        hvd.init()
    optimizer.step()  # of which everything is still to be reduced
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
def test_a_mismatch_is_raised_by_the_optimizer_it_belongs_to(hvd, world):
    good, bad = nn.Linear(2, 2), nn.Linear(2, 3 if world.rank == 1 else 2)
    first, second = (
        hvd.DistributedOptimizer(make_sgd(model), model.named_parameters()) for model in (good, bad)
    )
    (good(torch.ones(1, 2)).sum() + bad(torch.ones(1, 2)).sum()).backward()
    first.step()
    with pytest.raises(hvd.MismatchError, match="'(weight|bias)' is .*rank 1"):
        second.step()
    first.zero_grad()
    good(torch.ones(1, 2)).sum().backward()
    first.step()


def test_branches_in_the_first_step(hvd, world, comm):
    # Who has no gradient at all proposes an order too, when it steps.
    branch = branch_loss(lambda step, rank: "ab"[rank % 2])

    def loss(model, step, rank):
        return None if rank == 1 and step == 0 else branch(model, step, rank)

    compare_with_one_process(hvd, world, comm, Branches, make_sgd, loss)
