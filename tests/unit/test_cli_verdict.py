"""Which rank is blamed, with which status; what is shown of its output."""

from __future__ import annotations

import io
import signal
from typing import Any

import pytest

from hvdlite.cli.output import Output, last_words, speaks_of_others
from hvdlite.cli.rank import ERROR, OUTPUT, FrameReader, frame
from hvdlite.cli.verdict import RankRecord, judge


def rank(status: int | None, ended: float | None = 1.0, **given: Any) -> RankRecord:
    return RankRecord("hostA", True, ended, status, **given)


def test_all_is_well_only_with_a_record_of_every_rank() -> None:
    assert judge({0: rank(0), 1: rank(0)}, 2, 0).status == 0
    verdict = judge({0: rank(0), 1: rank(None)}, 2, 0)
    assert verdict.status == 1
    assert "Rank 1 on hostA vanished" in verdict.text
    assert "Rank 1 on ? never started" in judge({0: rank(0)}, 2, 0).text


def test_the_failure_of_mpirun_itself_counts() -> None:
    verdict = judge({0: rank(0), 1: rank(0)}, 2, 5)
    assert (verdict.status, verdict.rank) == (5, None)
    assert "mpirun itself failed" in verdict.text


def test_the_first_that_failed_by_itself_is_blamed() -> None:
    records = {
        0: rank(-signal.SIGTERM, 0.9, told=True),
        1: rank(3, 1.0),
        2: rank(7, 1.1),
        3: rank(None, 0.95, told=True),
    }
    records[3] = rank(None, 1.05)
    verdict = judge(records, 4, 1)
    assert (verdict.status, verdict.rank) == (3, 1)


def test_a_signal_is_reported_as_shells_do() -> None:
    verdict = judge({0: rank(-signal.SIGSEGV)}, 1, 0)
    assert verdict.status == 139
    assert "SIGSEGV" in verdict.text


def test_a_rank_that_was_ended_by_abort_has_mpiruns_status() -> None:
    """MPI_Abort(9) makes mpirun kill the rank that called it, too."""
    records = {
        0: rank(-signal.SIGTERM, 1.0, told=True),
        1: rank(-signal.SIGTERM, 1.2, told=True, trouble=0.8),
    }
    verdict = judge(records, 2, 9)
    assert (verdict.status, verdict.rank) == (9, 1)
    lost = judge({0: rank(None, 1.0), 1: rank(None, 1.1, trouble=0.9)}, 2, 9)
    assert (lost.status, lost.rank) == (9, 1)


def test_an_old_traceback_is_no_cause() -> None:
    records = {0: rank(-signal.SIGTERM, 100.0, told=True, trouble=5.0), 1: rank(4, 99.9)}
    assert judge(records, 2, 1).rank == 1


def test_a_lost_host_is_told_from_those_that_notice_it() -> None:
    records = {
        0: RankRecord("here", True, 1.2, 14, secondary=True),
        1: RankRecord("here", True, 1.3, -15, told=True),
        2: RankRecord("there", True, 1.1, None),
        3: RankRecord("there", True, 1.1, None),
    }
    verdict = judge(records, 4, 0, here="here")
    assert verdict.rank == 2
    assert verdict.status == 1
    assert "Ranks 2, 3 on there vanished" in verdict.text
    records[0].secondary = False  # the same without a word
    assert judge(records, 4, 0, here="here").rank == 2


def test_when_everything_is_lost_the_other_host_is_blamed() -> None:
    records = {
        0: RankRecord("here", True, 1.0, None),
        1: RankRecord("there", True, 1.1, None),
    }
    assert "Rank 1 on there vanished" in judge(records, 2, 255, here="here").text


def test_a_real_cause_beats_the_loss_of_others() -> None:
    records = {0: rank(1, 1.0, trouble=0.9, secondary=True), 1: rank(1, 1.1, trouble=1.0)}
    assert judge(records, 2, 1).rank == 1


@pytest.mark.parametrize(
    ("status", "asked", "expected"),
    [
        (-signal.SIGTERM, signal.SIGTERM, 143),
        (1, signal.SIGINT, 130),
        (5, signal.SIGTERM, 5),
        (None, signal.SIGTERM, 143),
        (0, signal.SIGTERM, 0),
    ],
)
def test_a_job_that_was_asked_to_end(status: int | None, asked: int, expected: int) -> None:
    verdict = judge({0: rank(status, told=True)}, 1, 0, stopping=0.5, asked=asked, reason="Asked.")
    assert verdict.status == expected


def test_a_job_that_never_started_has_a_hint() -> None:
    text = "ssh: Could not resolve hostname host9: Name or service not known"
    verdict = judge({}, 2, 255, launcher_text=text)
    assert verdict.status == 255
    assert "No rank started" in verdict.text
    assert "/etc/hosts" in verdict.text


# -- output -----------------------------------------------------------------------------------


def shown(*pieces: tuple[int, bytes, bytes], **given: Any) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out, err, **given)
    for piece in pieces:
        output.feed(*piece)
    output.close()
    return out.getvalue(), err.getvalue()


def test_lines_are_whole_and_marked_however_they_arrive() -> None:
    pieces = [(0, OUTPUT, b"he"), (1, OUTPUT, b"one\ntwo"), (0, OUTPUT, b"llo\n\n")]
    assert shown(*pieces) == ("[1] one\n[0] hello\n[0] \n[1] two\n", "")
    assert shown((0, OUTPUT, b"a\r"), (0, OUTPUT, b"\nb\n"))[0] == "[0] a\n[0] b\n"


def test_progress_bars_keep_their_returns() -> None:
    assert shown((1, ERROR, b"\r10 %\r20 %\n"))[1] == "[1] \r[1] 10 %\r[1] 20 %\n"


def test_output_that_is_no_text_does_no_harm() -> None:
    assert shown((0, OUTPUT, b"\xff\xfe\n"))[0] == "[0] \ufffd\ufffd\n"


def test_a_prompt_is_shown_before_its_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    output = Output(out, out)
    output.feed(0, OUTPUT, b"(Pdb) ")
    output.idle()
    assert out.getvalue() == ""
    now[0] += 1
    output.idle()
    assert out.getvalue() == "[0] (Pdb) "
    output.feed(1, OUTPUT, b"x\n")
    assert out.getvalue() == "[0] (Pdb) \n[1] x\n"


def test_no_prefix(tmp_path: Any) -> None:
    assert shown((0, OUTPUT, b"x\n"), prefix=False)[0] == "x\n"


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: y
hvdlite: rank 1 ended with an exception"""


def test_the_last_traceback_comes_with_what_it_is_chained_to() -> None:
    earlier = ["warning", "Traceback (most recent call last):", "OldError: caught", "going on"]
    assert last_words([*earlier, *TRACEBACK.splitlines()]) == TRACEBACK
    assert last_words(["a", "", "b"]) == "a\nb"
    assert last_words([]) == ""


def test_a_long_traceback_is_cut_in_the_middle() -> None:
    lines = ["Traceback (most recent call last):", *map(str, range(300)), "ValueError: end"]
    text = last_words(lines).splitlines()
    assert len(text) == 101
    assert text[-1] == "ValueError: end"
    assert "202 lines left out" in text[50]


def test_what_a_loss_sounds_like() -> None:
    assert speaks_of_others(["*** An error occurred in Socket closed"])
    assert speaks_of_others(["[host1:00000] *** An error occurred in PMIx Event Notification"])
    assert not speaks_of_others(TRACEBACK.splitlines())


def test_frames_survive_any_cut() -> None:
    stream = frame(b"o", b"abc") + frame(b"x") + frame(b"e", b"d" * 1000)
    for width in (1, 7, 400, len(stream)):
        reader = FrameReader()
        got = []
        for start in range(0, len(stream), width):
            got += reader.feed(stream[start : start + width])
        assert got == [(b"o", b"abc"), (b"x", b""), (b"e", b"d" * 1000)]
