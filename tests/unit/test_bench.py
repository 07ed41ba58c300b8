"""The benchmark's arithmetic, and what its tables say, from samples made up here."""

from __future__ import annotations

import json
import math

import pytest

from hvdlite.bench import allreduce, cli, many, models, plot, steps, turns
from hvdlite.bench.arithmetic import (
    best,
    bus_bandwidth,
    fraction_of_limit,
    nearest,
    number,
    paired,
    pooled,
    quartiles,
    size_label,
)
from hvdlite.bench.records import Record, Results, Skipped, Table

MIB = 1 << 20


def test_quartiles_of_few_samples():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        quartiles([])


def test_turns_that_failed_do_not_count():
    assert pooled([[1.0], [], [3.0]]).median == 2.0
    # 4/2 and 9/3; the middle turn has nothing to compare.
    assert paired([[4.0], [100.0], [9.0]], [[2.0], [], [3.0]]).median == 2.5


def test_ratios_are_taken_turn_by_turn():
    # The machine is ten times slower in the second turn: that is no difference between peers.
    slow, fast = [[2.0], [20.0]], [[1.0], [10.0]]
    assert paired(slow, fast) == (2.0, 2.0, 2.0)


def test_the_best_peer_of_every_turn():
    assert best([[[3.0], [1.0], []], [[2.0], [5.0], []]]) == [[2.0], [1.0], ()]


def test_bandwidths():
    # Four ranks send 3/4 of the bytes twice.
    assert bus_bandwidth(1000, 4, 2.0) == 750.0
    assert bus_bandwidth(1000, 2, 1.0) == 1000.0
    assert bus_bandwidth(1000, 1, 1.0) == 0.0
    # 1000 bytes read and written at 4000 bytes a second take half a second.
    assert fraction_of_limit(1000, 4000.0, 0.5) == 1.0
    assert fraction_of_limit(1000, 4000.0, 2.0) == 0.25


def test_the_limit_of_the_nearest_size():
    limits = {1 << 10: 1.0, 1 << 20: 2.0}
    assert nearest(limits, 1 << 14) == 1.0
    assert nearest(limits, 1 << 16) == 2.0
    assert nearest(limits, 1 << 30) == 2.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1230"),
        (12.345, "12.3"),
        (0.012345, "0.0123"),
        (9.999, "10.0"),
        (-0.5, "-0.500"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_sizes():
    assert [size_label(n) for n in (4, 1 << 10, 1536, 3 * MIB, 1 << 30)] == [
        "4 B",
        "1 KiB",
        "1536 B",
        "3 MiB",
        "1 GiB",
    ]


def test_peers_take_turns_in_going_first():
    assert turns.rotated(["a", "b", "c"], 1) == ["b", "c", "a"]
    assert turns.rotated(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert turns.rotated([], 2) == []


def _record(peer, seconds, what="1 MiB", *, suite="allreduce", case="float32", nbytes=MIB, ranks=2):
    return Record(suite, case, ranks, peer, what, "s", [[seconds]] * 3, nbytes)


def test_allreduce_tables():
    records = [_record("hvdlite", 1e-3), _record("mpi", 4e-3), _record("gloo", 2e-3)]
    # At this limit the array is read and written in half a millisecond.
    times, ratios, speeds = allreduce.tables(records, {MIB: 2 * MIB / 0.5e-3})
    assert times.rows == [
        ["1 MiB", "1.00 (1.00 to 1.00)", "4.00 (4.00 to 4.00)", "2.00 (2.00 to 2.00)"]
    ]
    assert ratios.header == ["bytes", "mpi / hvdlite", "gloo / hvdlite", "best of them / hvdlite"]
    assert [cell.split()[0] for cell in ratios.rows[0][1:]] == ["4.00", "2.00", "2.00"]
    # One MiB in a millisecond, at half, an eighth and a quarter of the limit.
    assert speeds.rows == [["1 MiB", "1.05 (0.50)", "0.262 (0.12)", "0.524 (0.25)"]]


def test_what_a_peer_could_not_do_is_a_dash():
    records = [_record("hvdlite", 1e-3), _record("hvdlite", 1e-3, "4 B", nbytes=4)]
    records.append(_record("gloo", 1e-3))
    times, ratios, speeds = allreduce.tables(records, {})
    assert times.rows[1] == ["4 B", "1.00 (1.00 to 1.00)", "-"]
    assert ratios.rows[1] == ["4 B", "-"]
    # Four bytes have no bandwidth worth the name; and without limits there are no fractions.
    assert speeds.rows == [["1 MiB", "1.05", "1.05"]]
    assert allreduce.tables([], {}) == []


def test_step_tables():
    records = [
        _record(peer, seconds, "step", suite="steps", case="mlp", nbytes=None)
        for peer, seconds in {"alone": 0.1, "ddp": 0.2, "hvdlite": 0.12}.items()
    ]
    times, added = steps.tables(records)
    assert times.header == ["model", "alone", "ddp", "hvdlite", "hvdlite / ddp"]
    assert times.rows[0][0] == models.MODELS["mlp"]
    assert times.rows[0][-1] == "0.600 (0.600 to 0.600)"
    assert added.rows == [[models.MODELS["mlp"], "100 %", "-", "-"]]  # on other pages


def test_overheads_are_those_over_compute_on_the_same_pages():
    seconds = {"alone": 0.2, "alone-huge": 0.1, "ddp": 0.3, "ddp-huge": 0.2, "hvdlite": 0.12}
    records = [
        _record(peer, value, "step", suite="steps", case="cnn", nbytes=None)
        for peer, value in seconds.items()
    ]
    _, added = steps.tables(records)
    assert added.header[1:4] == ["ddp", "ddp-huge", "hvdlite"]
    assert added.rows == [[models.MODELS["cnn"], "50 %", "100 %", "20 %", "0.400", "0.200"]]


def test_ratio_tables_without_the_base():
    table = many.ratio_table("t", [_record("gloo", 2e-3, "x")], scale=1e3, unit="ms")
    assert table.rows == [["x", "2.00 (2.00 to 2.00)", "-"]]


def test_the_gradients_of_resnet50():
    shapes = many.resnet50_shapes()
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032


def test_limits_are_the_better_of_copying_and_adding():
    records = [
        Record("limits", "", 2, "memory", "copy 1 MiB", "B/s", [[1.0, 2.0, 9.0]], MIB),
        Record("limits", "", 2, "memory", "add 1 MiB", "B/s", [[3.0, 3.0, 3.0]], MIB),
        Record("limits", "", 4, "memory", "add 1 MiB", "B/s", [[7.0]], MIB),
    ]
    results = Results({}, records)
    assert results.limits(2) == {MIB: 3.0}
    assert results.limits(4) == {MIB: 7.0}
    assert results.limits(3) == {}


def test_curves():
    record = Record("allreduce", "float32", 2, "x", "", "s", [[1e-3, 2e-3, 4e-3]], 1_000_000)
    alone = Record("allreduce", "float32", 1, "x", "", "s", [[1e-3]], 1_000_000)
    [(nbytes, low, middle, high)] = plot.curves([record, alone])["x"]
    assert nbytes == 1_000_000
    # Quartiles of the times are 1.5, 2 and 3 ms.
    assert (low, middle, high) == pytest.approx((1 / 3, 0.5, 2 / 3))


def test_a_picture_needs_figures(tmp_path):
    assert "no all-reduces" in (plot.plot(Results({}), tmp_path / "x.png") or "")


def test_tables_are_markdown():
    text = Table("Title", ["", "peer"], [["row", "1.00"]]).markdown()
    assert text.splitlines() == [
        "### Title",
        "",
        "|     | peer |",
        "|-----|------|",
        "| row | 1.00 |",
    ]


def test_results_survive_json():
    results = Results({"a": 1}, [_record("x", 1.0)], [Table("t", ["h"], [["r"]])])
    results.skipped.append(Skipped("steps", None, "ddp", "torch is not installed"))
    back = json.loads(json.dumps(results.as_json()))
    assert Record(**back["records"][0]) == results.records[0]
    assert back["skipped"][0]["why"] == "torch is not installed"


def test_peers_that_are_not_there_are_named(monkeypatch, capsys):
    missing = {"torch", "absent"}
    monkeypatch.setattr(turns, "installed", lambda name: name not in missing)
    options = turns.Options(modules=("absent",), other_mpi=("/other/python",))
    session = turns.Session(options, Results({}))
    assert session.peers("many", ["hvdlite", "gloo", "mpi"], "module:") == [
        "hvdlite",
        "mpi",
        "mpi2",
    ]
    told = capsys.readouterr().out
    assert "gloo: torch is not installed" in told
    assert "absent: there is no such module" in told


def test_only_the_chosen_peers():
    session = turns.Session(turns.Options(peers=("mpi2",), other_mpi=("p",)), Results({}))
    assert session.peers("many", ["hvdlite", "mpi"]) == ["mpi2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no suite is called nonsense; there are limits, allreduce"),
        (["--peers", "nobody"], "no peer is called nobody"),
        (["--np", "0"], "0 is not positive"),
        (["--turns", "many"], "invalid"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "millions"), [("mlp", 25.2), ("cnn", 11.2), ("transformer", 6.6)])
def test_models_are_as_large_as_they_are_called(name, millions):
    torch = pytest.importorskip("torch")
    model, inputs, targets = models.build(name, 0)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    with torch.no_grad():
        outputs = model(inputs)
    assert outputs.reshape(-1, outputs.shape[-1]).shape[0] == targets.shape[0]


def test_ranks_have_the_same_model_and_other_data():
    torch = pytest.importorskip("torch")
    one, inputs, _ = models.build("tiny", 0)
    two, others, _ = models.build("tiny", 1)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(inputs, others)
