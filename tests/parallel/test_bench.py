"""`python -m hvdlite.bench` runs, and writes what it says; its figures mean nothing here."""

from __future__ import annotations

import json

import pytest

from .jobs import run_python

pytestmark = pytest.mark.whole_job


@pytest.mark.limit(150)
def test_the_command_measures_and_saves(tmp_path):
    arguments = [
        "allreduce",
        "many",
        "latency",
        "--quick",
        "--np",
        "2",
        "--peers",
        "hvdlite",
        "mpi",
    ]
    script = "import sys; from hvdlite.bench import main; sys.exit(main(sys.argv[1:]))"
    result = run_python(script, timeout=120, arguments=[*arguments, "--out", str(tmp_path)])
    assert result.returncode == 0, result
    assert not result.left_behind, result
    assert "load average over the whole run" in result.stdout
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["about"]["machine"]["processor"]
    assert saved["about"]["load"].keys() == {"before", "after"}
    assert saved["about"]["ranks"] == [2]
    measured = {(record["suite"], record["peer"]) for record in saved["records"]}
    assert measured == {
        ("limits", "memory"),
        *(
            (suite, peer)
            for suite in ("allreduce", "many", "latency")
            for peer in ("hvdlite", "mpi")
        ),
    }
    for record in saved["records"]:
        assert record["ranks"] == 2
        assert record["unit"] == ("B/s" if record["suite"] == "limits" else "s")
        assert len(record["turns"]) == 1
        assert record["turns"][0]
        assert all(sample > 0 for sample in record["turns"][0])
    sizes = {r["nbytes"] for r in saved["records"] if r["suite"] == "allreduce"}
    assert sizes == {4, 1 << 16, 1 << 20}
    for table in saved["tables"]:
        assert table["rows"], table
        assert all(len(row) == len(table["header"]) for row in table["rows"])
        assert table["title"] in (tmp_path / "tables.md").read_text()
        assert table["title"] in result.stdout
    # A picture, or the reason why there is none.
    assert (tmp_path / "allreduce.png").exists() or "matplotlib is not installed" in result.stdout
