"""What docs/scaling.md says of messages and bytes, counted on communicators in memory."""

from __future__ import annotations

import math
import os

import pytest

from benchmarks.simulation import (
    allreduce,
    model_allreduce_bytes,
    model_allreduce_messages,
    model_round_bytes,
    negotiation,
)


@pytest.mark.parametrize(("size", "tensors"), [(2, 161), (32, 161), (256, 30)])
def test_negotiation(size, tensors):
    first, second, third = negotiation(size, tensors)
    # What is new takes one message to rank 0 and one back, besides the round.
    assert {count["rounds"] for count in first} == {1}
    assert [count["messages"] for count in first] == [size - 1] + [1] * (size - 1)
    news = {count["bytes"] for count in first[1:]}
    assert len(news) == 1
    # After that, a step is one round of bits: no messages, and no more of it on more ranks.
    for counts in (second, third):
        assert {count["rounds"] for count in counts} == {1}
        assert {count["messages"] for count in counts} == {0}
        assert {count["bytes of rounds"] for count in counts} == {model_round_bytes(tensors)}
    assert model_round_bytes(161) == 320


def test_what_rank_0_handles_of_news_grows_with_the_ranks_and_tensors():
    few, more = (negotiation(size, 20, 1)[0] for size in (8, 64))
    assert more[0]["bytes"] / few[0]["bytes"] == pytest.approx(63 / 7, rel=0.01)
    assert more[1]["bytes"] == few[1]["bytes"]
    twice = negotiation(8, 40, 1)[0]
    assert twice[1]["bytes"] / few[1]["bytes"] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("size", [2, 8, 24])
def test_ring(size):
    length, segment = 2**14 * 3, 1024
    counts = allreduce(size, 1, length, segment, hierarchical=False)
    for count in counts:
        expected = model_allreduce_bytes(size, 1, 4 * length)
        assert count["bytes to other hosts"] == pytest.approx(expected, rel=1e-4)
        expected = model_allreduce_messages(size, 1, 4 * length, segment)
        assert count["messages"] == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous files here")
@pytest.mark.parametrize(("size", "each"), [(4, 2), (16, 4), (48, 8)])
def test_hierarchical(size, each):
    length, segment = 2**13 * 3, 512
    counts = allreduce(size, each, length, segment, hierarchical=True)
    hosts = size // each
    for count in counts:
        expected = model_allreduce_bytes(hosts, each, 4 * length)
        assert count["bytes to other hosts"] == pytest.approx(expected, rel=1e-4)
        assert count["bytes"] == count["bytes to other hosts"]
        expected = model_allreduce_messages(hosts, each, 4 * length, segment)
        assert count["messages"] == pytest.approx(expected, rel=0.01)
    # Against a ring of all ranks, a host's link carries less by this.
    flat = sum(c["bytes to other hosts"] for c in allreduce(size, each, length, segment, False))
    saved = math.fsum(count["bytes to other hosts"] for count in counts) / flat
    assert saved == pytest.approx((1 - 1 / hosts) / (1 - 1 / size), rel=1e-4)
