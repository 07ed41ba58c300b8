"""Rounds of words through shared memory, under any timing."""

import random

import numpy as np
import pytest

from hvdlite.transport.shared_words import TABLE_BYTES, SharedWords


def make(size):
    tables = [np.zeros(TABLE_BYTES, np.uint8) for _ in range(size)]
    return [SharedWords(rank, tables) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_every_rank_gets_what_all_have_in_common(size, seed):
    order = random.Random(seed)
    ranks = make(size)
    rounds = [
        [np.array([order.getrandbits(64) for _ in range(width)], np.uint64) for _ in range(size)]
        for width in order.choices([1, 3, 70, 1024], k=8)
    ]
    expected = [np.bitwise_and.reduce(words) for words in rounds]
    at = [0] * size
    pending = [None] * size
    while min(at) < len(rounds):
        rank = order.randrange(size)
        if at[rank] == len(rounds):
            continue
        words = rounds[at[rank]][rank]
        if pending[rank] is None:
            pending[rank] = ranks[rank].iband(words)
        elif pending[rank].Test():
            np.testing.assert_array_equal(words, expected[at[rank]])
            at[rank] += 1
            pending[rank] = None
        else:
            assert min(at) <= at[rank]


def test_a_round_does_not_end_before_all_have_begun_it():
    first, second, third = make(3)
    words = [np.array([bits], np.uint64) for bits in (0b111, 0b110, 0b011)]
    one = first.iband(words[0])
    two = second.iband(words[1])
    assert not one.Test() and not two.Test()
    three = third.iband(words[2])
    assert one.Test() and two.Test() and three.Test()
    assert [int(each[0]) for each in words] == [0b010] * 3


def test_too_many_words_are_refused_without_a_trace():
    first, second = make(2)
    assert first.iband(np.zeros(1025, np.uint64)) is None
    one, two = np.array([5], np.uint64), np.array([4], np.uint64)
    pending = first.iband(one), second.iband(two)
    assert all(each.Test() for each in pending)
    assert one[0] == two[0] == 4
