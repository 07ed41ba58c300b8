"""The parts of the engine that need no communication: cache, coordinator, fusion, stalls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.engine.cache import ResponseCache
from hvdlite.engine.coordinator import Coordinator, find_mismatch, show_ranks
from hvdlite.engine.fusion import FusionBuffers, plan
from hvdlite.engine.requests import (
    Kind,
    News,
    Reply,
    Request,
    Response,
    decode,
    display,
    encode,
    wire_dtype,
)
from hvdlite.engine.stall import describe_stall
from hvdlite.transport.types import DType, ReduceOp


def allreduce(*shapes, dtype=DType.FLOAT32, op=ReduceOp.SUM, **kw):
    return Request(Kind.ALLREDUCE, (dtype,) * len(shapes), tuple(shapes), op, **kw)


# -- the wire ---------------------------------------------------------------------------


def test_messages_survive_the_wire():
    request = allreduce((2, 3), (4,), prescale=0.5)
    news = News((("a", request), (7, request)), "leaving")
    assert decode(News, encode(news)) == news
    reply = Reply((Response("a", request, ((1, 2),), "bad"),), (1, 0), ((1, "gone"),))
    back = decode(Reply, encode(reply))
    assert back == reply
    assert isinstance(back.responses[0].request.dtypes[0], DType)
    assert isinstance(back.responses[0].request.op, ReduceOp)


def test_digest_depends_on_values_and_not_on_identity():
    shape = (3, 4)
    twice = Request(Kind.ALLREDUCE, (DType.INT8,) * 2, (shape, shape))
    apart = Request(Kind.ALLREDUCE, (DType.INT8,) * 2, ((3, 4), (3, 4)))
    assert twice.digest == apart.digest
    assert twice.digest != twice._replace(postscale=2.0).digest


# -- cache ------------------------------------------------------------------------------


def response(name):
    return Response(name, allreduce((1,)))


def test_cache_reuses_the_lowest_free_slot_and_drops_the_least_recently_used():
    cache = ResponseCache(2)
    mine = allreduce((1,))
    assert cache.insert(response("a"), mine) is None
    assert cache.insert(response("b"), mine) is None
    assert cache.find("a").slot == 0 and cache.find("b").slot == 1
    assert cache.use([0], {0: "a", 1: "b"}) == [response("a")]
    assert cache.insert(response("c"), mine) == "b"
    assert cache.find("b") is None
    assert cache.find("c").slot == 1
    assert cache.slots == 2


def test_cache_of_capacity_zero_keeps_nothing():
    cache = ResponseCache(0)
    assert cache.insert(response("a"), allreduce((1,))) is None
    assert len(cache) == 0 and cache.slots == 0


@given(st.lists(st.tuples(st.sampled_from("iue"), st.integers(0, 5)), max_size=60))
def test_caches_that_see_the_same_events_stay_equal(events):
    caches = [ResponseCache(3), ResponseCache(3)]
    for cache in caches:
        for what, number in events:
            name = f"n{number}"
            found = cache.find(name)
            if what == "i":
                cache.insert(response(name), allreduce((1,)))
            elif found is not None and what == "u":
                cache.use([found.slot], {found.slot: name})
            elif found is not None:
                cache.evict(found.slot)
    slots = [{n: c.find(n).slot for n in map("n{}".format, range(6)) if c.find(n)} for c in caches]
    assert slots[0] == slots[1]
    assert len(slots[0]) <= 3
    assert len(set(slots[0].values())) == len(slots[0])


# -- coordinator ------------------------------------------------------------------------


def test_a_response_needs_every_rank():
    coordinator = Coordinator(range(3))
    request = allreduce((2,))
    first = coordinator.digest([News((("a", request),)), News(()), News((("a", request),))])
    assert first.responses == ()
    second = coordinator.digest([News(()), News((("a", request),)), News(())])
    assert [r.key for r in second.responses] == ["a"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (allreduce((3,), dtype=DType.FLOAT64), ["data type", "float32 on ranks 4", "float64"]),
        (allreduce((4,)), ["shape", "(3,) on ranks 4", "(4,) on rank 9"]),
        (allreduce((3,), (3,)), ["number of tensors", "1 on ranks 4", "2 on rank 9"]),
        (allreduce((3,), op=ReduceOp.MIN), ["reduce op", "Sum", "Min on rank 9"]),
        (allreduce((3,), prescale=2.0), ["prescale factor", "1.0", "2.0 on rank 9"]),
        (allreduce((3,), postscale=2.0), ["postscale factor", "2.0 on rank 9"]),
        (
            Request(Kind.BROADCAST, (DType.FLOAT32,), ((3,),), root=0),
            ["operation", "allreduce on ranks 4", "broadcast on rank 9"],
        ),
    ],
)
def test_a_mismatch_names_both_values_and_their_ranks(other, words):
    text = find_mismatch("w", {0: allreduce((3,)), 1: allreduce((3,)), 2: other}, (4, 7, 9))
    assert text.startswith("Mismatched ")
    assert "'w'" in text
    for word in words:
        assert word in text


def test_first_dimensions_of_allgather_may_differ_and_others_may_not():
    def gather(*shape):
        return Request(Kind.ALLGATHER, (DType.INT8,), (shape,))

    assert find_mismatch("g", {0: gather(2, 3), 1: gather(5, 3)}, (0, 1)) is None
    assert "Mismatched shape" in find_mismatch("g", {0: gather(2, 3), 1: gather(2, 4)}, (0, 1))


def test_joining_completes_what_waited_for_the_joined_rank_alone():
    coordinator = Coordinator(range(2))
    coordinator.digest([News((("a", allreduce((2,))),)), News(())])
    reply = coordinator.digest([News(()), News((("hvdlite.join", Request(Kind.JOIN)),))])
    assert [r.key for r in reply.responses] == ["a"] and reply.joined == (1,)
    reply = coordinator.digest([News((("hvdlite.join", Request(Kind.JOIN)),)), News(())])
    assert reply.joined == (1, 0)
    assert coordinator.joined == []


def test_ranks_are_shown_as_ranges():
    assert show_ranks([3]) == "rank 3"
    assert show_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert len(show_ranks(range(1000))) < 20
    assert show_ranks(range(0, 2000, 2)).endswith(", 36, 38 and 980 more")


# -- fusion -----------------------------------------------------------------------------


def sizes_of(batches):
    return [[p.elements for p in batch.pieces] for batch in batches]


def agreed(*requests):
    return [(Response(f"t{i}", request), None) for i, request in enumerate(requests)]


def test_tensors_share_a_batch_up_to_the_threshold():
    requests = [allreduce((n,)) for n in (4, 4, 4, 100, 4)]
    assert sizes_of(plan(agreed(*requests), 48)) == [[4, 4, 4], [100], [4]]
    assert sizes_of(plan(agreed(*requests), 47)) == [[4, 4], [4], [100], [4]]
    assert sizes_of(plan(agreed(*requests), 0)) == [[4], [4], [4], [100], [4]]


def test_what_differs_does_not_share_a_batch():
    requests = [
        allreduce((1,)),
        allreduce((2,), dtype=DType.FLOAT64),
        allreduce((3,), op=ReduceOp.MAX),
        allreduce((4,), prescale=2.0),
        allreduce((5,)),
    ]
    assert sizes_of(plan(agreed(*requests), 1 << 20)) == [[1, 5], [2], [3], [4]]


def test_a_group_of_mixed_types_is_spread_over_batches():
    request = Request(Kind.ALLREDUCE, (DType.FLOAT32, DType.INT32), ((2,), (3,)))
    assert sizes_of(plan(agreed(request), 1 << 20)) == [[2], [3]]


def test_integer_averages_travel_as_int64():
    assert wire_dtype(Kind.ALLREDUCE, DType.UINT8, ReduceOp.AVERAGE) is DType.INT64
    assert wire_dtype(Kind.ALLREDUCE, DType.UINT64, ReduceOp.AVERAGE) is DType.UINT64
    assert wire_dtype(Kind.ALLREDUCE, DType.UINT8, ReduceOp.SUM) is DType.UINT8
    assert wire_dtype(Kind.ALLREDUCE, DType.FLOAT16, ReduceOp.AVERAGE) is DType.FLOAT16


def test_fusion_buffers_are_used_again():
    buffers = FusionBuffers(2, lambda nbytes: np.empty(nbytes, np.uint8))
    first = buffers.acquire(100)
    buffers.release(first)
    assert buffers.acquire(50) is first
    other = buffers.acquire(10)
    assert other is not first
    assert not np.shares_memory(first, other)


# -- stalls -----------------------------------------------------------------------------


def test_a_stall_is_described_by_who_misses_what():
    answers = {0: {"a": 70.0, "b": 10.0}, 1: {"a": 65.0}, 2: {}}
    text = describe_stall(answers, (0, 1, 2), 60)
    assert "'a'" in text and "not submitted by rank 2" in text and "70 s" in text
    assert "'b'" not in text
    assert describe_stall({0: {"a": 1.0}, 1: {}}, (0, 1), 60) is None


def test_a_rank_that_does_not_answer_is_named():
    text = describe_stall({0: {"a": 70.0}}, (0, 1), 60)
    assert "rank 1 did not answer" in text


def test_a_stall_of_many_ranks_and_tensors_stays_readable():
    ranks = range(64)
    waiting = {f"layer{i}.weight": 61.0 for i in range(500)}
    answers = {r: (waiting if r != 63 else {}) for r in ranks}
    text = describe_stall(answers, ranks, 60)
    assert "500 tensors" in text and "not submitted by rank 63" in text
    assert len(text) < 600


def test_a_stall_in_which_every_rank_misses_something_else_stays_readable():
    ranks = range(64)
    ages = {f"layer{i}": 61.0 + i for i in ranks}
    answers = {r: {n: age for n, age in ages.items() if n != f"layer{r}"} for r in ranks}
    text = describe_stall(answers, ranks, 60)
    # The oldest come first, and the rest is summed up.
    assert text.index("'layer63'): not submitted by rank 63;") < text.index("'layer62'")
    assert "'layer58'" in text and "'layer57'" not in text
    assert "58 more that wait for shorter, each for some of ranks 0-57" in text
    assert len(text) < 800


def test_a_stall_of_alternating_ranks_stays_readable():
    ranks = range(64)
    text = describe_stall({r: {"w": 70.0} if r % 2 else {} for r in ranks}, ranks, 60)
    assert "not submitted by ranks 0, 2, 4" in text and "38 and 12 more" in text
    assert len(text) < 400


def test_a_stall_names_ranks_as_the_job_does_and_not_the_set():
    text = describe_stall({0: {"w": 70.0}, 1: {}}, (5, 9), 60)
    assert "not submitted by rank 9" in text


def test_unnamed_requests_have_a_name_to_show():
    assert display(3, Kind.ALLGATHER) == "allgather.noname.3"
    assert display("w", Kind.ALLGATHER) == "w"
