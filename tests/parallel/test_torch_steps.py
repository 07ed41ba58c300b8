"""What may come between two steps, and when gradients are reduced (B6, B8, B13, B14, B17)."""

from __future__ import annotations

import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    branch_loss,
    inputs_of,
    make_adamw,
    make_cnn,
    make_sgd,
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


# -- zero_grad, passes, synchronize ---------------------------------------------------------


@pytest.mark.parametrize("how", ["default", "none", "zeros", "model", "by hand", "mixed"])
def test_zero_grad(hvd, world, comm, how):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)

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

    loss = branch_loss(lambda step, rank: "both")
    for step in range(5):
        clear(step)
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


def test_gradients_replaced_by_user_code(hvd, world):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    loss = branch_loss(lambda step, rank: "a")
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
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    total = [torch.zeros_like(p) for p in alone.parameters()]
    for step in range(3):
        model(inputs_of(step, world.rank), "both").square().sum().backward()
        optimizer.step()
        for rank in world.ranks:
            value = alone(inputs_of(step, rank), "both").square().sum() / world.size
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
        make_sgd(model), model.named_parameters(), backward_passes_per_step=1 if changed else 2
    )
    if changed:
        train(model, optimizer, [50], world.rank, world.size)
        train(alone, plain := make_sgd(alone), [50])
        optimizer.set_backward_passes_per_step(2)
    else:
        plain = make_sgd(alone)
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
        make_sgd(model), model.named_parameters(), backward_passes_per_step=3
    )
    plain = make_sgd(alone)
    loss = branch_loss(lambda step, rank: "ab"[rank % 2])
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


@pytest.mark.np(2, 3)
def test_too_many_passes(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):  # before and after the buckets are agreed
        model(inputs_of(0, world.rank), "a").sum().backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            model(inputs_of(1, world.rank), "a").sum().backward()
        # The gradient that was one too many is there already.
        with pytest.raises(RuntimeError, match="'a.bias' .changed in place."):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.np(2, 3)
def test_zero_grad_while_gradients_are_reduced(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        model(inputs_of(0, world.rank), "a").sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="synchronize"):
            optimizer.set_backward_passes_per_step(2)
        optimizer.synchronize()
        optimizer.zero_grad()


def test_clipping(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
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
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), op=hvd.Sum)
    plain = make_sgd(alone)
    loss = branch_loss(lambda step, rank: "a")
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
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        model(inputs_of(0, world.rank), "a").sum().backward()
        with pytest.raises(RuntimeError, match="synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("what", ["type", "shape"])
def test_a_parameter_that_changes_is_refused(hvd, world, comm, what):
    if world.size == 1:
        pytest.skip("one rank reduces nothing")
    model = nn.Embedding(4, 2, dtype=F64)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([world.rank])).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    if what == "type":
        model.float()
    else:
        model.weight.data = torch.ones(6, 2, dtype=F64)
    with pytest.raises(RuntimeError, match=r"'weight' is .* but was .* make a new optimizer"):
        model(torch.tensor([world.rank])).sum().backward()
    # What the advice leads to.
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    model.zero_grad()
    model(torch.tensor([world.rank])).sum().backward()
    optimizer.step()
    assert model.weight.grad[0, 0].item() == pytest.approx(1 / world.size)


# -- several optimizers ---------------------------------------------------------------------


def test_two_optimizers_with_a_common_backward(hvd, world, comm):
    def make():
        torch.manual_seed(8)
        return nn.Linear(3, 4).to(F64), nn.Linear(4, 1).to(F64)

    def optimizers(pair):
        return make_adamw(pair[0]), make_sgd(pair[1])

    mine, alone = make(), make()
    generator, critic = (
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for model, optimizer in zip(mine, optimizers(mine), strict=True)
    )
    plain_generator, plain_critic = optimizers(alone)

    def real(pair, step, rank):
        return pair[1](inputs_of(step, rank, (5, 4))).square().mean()

    def fake(pair, step, rank):
        return pair[1](torch.tanh(pair[0](inputs_of(step + 50, rank, (5, 3))))).mean()

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


def test_threads_that_train_a_model_each(hvd, world, comm):
    loss = branch_loss(lambda step, rank: "both")
    for attempt in range(3):
        models = [Branches() for _ in range(3)]
        optimizers = [
            hvd.DistributedOptimizer(make_sgd(model), model.named_parameters()) for model in models
        ]
        problems = []

        def work(number, models=models, optimizers=optimizers, problems=problems):
            try:
                for step in range(3):
                    optimizers[number].zero_grad()
                    loss(models[number], number + step, world.rank).backward()
                    optimizers[number].step()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not problems
        assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
        for number, model in enumerate(models):
            alone = Branches()
            simulate(alone, make_sgd(alone), loss, range(number, number + 3), world.size)
            assert_close(parameters_of(model), parameters_of(alone), f"attempt {attempt}", 1e-11)


def test_an_optimizer_that_replaces_another(hvd, world, comm):
    model = Branches()
    first = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    model(inputs_of(0, world.rank), "a").sum().backward()
    first.step()
    first.zero_grad()
    second = hvd.DistributedOptimizer(make_adamw(model), model.named_parameters())
    model(inputs_of(1, world.rank), "both").sum().backward()
    if world.size > 1:
        with pytest.raises(RuntimeError, match="another DistributedOptimizer"):
            first.step()
    second.step()
    assert_same_on_all_ranks(comm, model.parameters())
    del first, second
    # With nobody left to reduce them gradients stay as they are: no hook remains.
    model.zero_grad()
    for _ in range(2):
        model(inputs_of(world.rank, world.rank), "both").sum().backward()


# -- joining, starting again, errors ---------------------------------------------------------


def test_joined_ranks(hvd, world, comm):
    # Rank r has r + 2 batches. Who has joined contributes zeros; averages divide by all.
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    branch = branch_loss(lambda step, rank: "a")
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


def test_shutdown_and_init_in_mid_training(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    for step in range(3):
        train(model, optimizer, [step], world.rank, world.size)
        gradients = [p.grad for p in model.parameters()]
        hvd.shutdown()
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        if world.size > 1:
            with pytest.raises(hvd.NotInitializedError, match="init()"):
                train(model, optimizer, [step], world.rank, world.size)
            model.zero_grad()
        hvd.init()
        train(alone, plain, [step])
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-10)
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
def test_after_an_error_training_goes_on(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), bucket_bytes=300
    )
    plain = make_sgd(alone)
    for step in range(3):
        train(model, optimizer, [step], world.rank, world.size)
        train(alone, plain, [step])
        # One rank takes a name that the other reduces under something else.
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(torch.ones(1 + (world.rank == 0)), name="other")
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-10)
