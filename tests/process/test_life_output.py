"""Where the words of workers go: whole lines with name and rank, the controller's own, or files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asyncwg import WorkerDiedError
from tests.leaks import bounded
from tests.process.workers_life import Talker, group


async def test_lines_arrive_whole_with_name_and_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """They overwrote each other: https://github.com/tqdm/tqdm/issues/285.

    See also https://github.com/Lightning-AI/litData/issues/76.
    """
    async with group(Talker, 2, name="talk", output="prefix") as wg:
        await bounded(wg.lines(100, 200))
    shown = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        assert [line for line in shown if line.startswith(f"[talk:{rank}] ")] == [
            f"[talk:{rank}] " + f"{rank}-{number}-".ljust(200, "x") for number in range(100)
        ]
    assert len(shown) == 200


async def test_progress_bars_of_several_ranks_are_lines_of_their_own_and_harm_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They overwrote each other and what was printed: https://github.com/tqdm/tqdm/issues/285."""
    begun = time.monotonic()
    async with group(Talker, 2, name="talk", output="prefix") as wg:
        await bounded(wg.bar(100))
    seconds = time.monotonic() - begun
    out, err = capfd.readouterr()
    assert "\r" not in out + err
    for rank in (0, 1):
        assert [line for line in out.splitlines() if line.startswith(f"[talk:{rank}] ")] == [
            f"[talk:{rank}] " + f"{rank}-{step}-".ljust(200, "x") for step in range(100)
        ]
        bars = [line for line in err.splitlines() if line.startswith(f"[talk:{rank}] ")]
        states = [int(line.removeprefix(f"[talk:{rank}] {rank}: ").split("%|")[0]) for line in bars]
        assert states == sorted(states)
        assert states[-1] == 100
        # The first, the last, and one a second between them.
        assert len(states) <= 2 + seconds
    assert len(out.splitlines()) == 200
    assert all(line.startswith("[talk:") for line in err.splitlines())


async def test_the_state_of_a_bar_at_a_death_is_shown_and_in_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """https://github.com/Lightning-AI/litData/issues/76."""
    async with group(Talker, 2, name="talk") as wg:
        with pytest.raises(WorkerDiedError) as caught:
            await bounded(wg[1].bar_and_die())
    assert caught.value.stderr_tail[-1] == "1: 20%"
    assert capfd.readouterr().err.splitlines()[-1] == "[talk:1] 1: 20%"


async def test_a_line_in_pieces_arrives_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    async with group(Talker, 1, name="talk") as wg:
        await bounded(wg.pieces())
    out, err = capfd.readouterr()
    assert out == "[talk:0] abc\n"
    assert err == "[talk:0] to stderr\n"


async def test_a_line_without_an_end_is_shown_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    async with group(Talker, 1, name="talk") as wg:
        await bounded(wg.unfinished())
    assert capfd.readouterr().out == "[talk:0] no newline\n"


async def test_words_that_were_never_flushed_are_shown_at_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with group(Talker, 1, name="talk") as wg:
        await bounded(wg.lines(1, 5))
    assert capfd.readouterr().out == "[talk:0] 0-0-x\n"


async def test_the_last_words_before_a_death_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """They were lost: https://github.com/Lightning-AI/litData/issues/76."""
    async with group(Talker, 2, name="talk") as wg:
        with pytest.raises(WorkerDiedError):
            await bounded(wg[1].say_and_die())
    assert "[talk:1] last words\n" in capfd.readouterr().out


async def test_bytes_that_are_no_text_are_shown_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with group(Talker, 1, name="talk") as wg:
        await bounded(wg.raw("gr\xfc\xdfe ".encode() + b"\xff\xfe end\n"))
    assert capfd.readouterr().out == "[talk:0] gr\xfc\xdfe \ufffd\ufffd end\n"


async def test_a_character_that_arrives_in_pieces_stays_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with group(Talker, 1, name="talk") as wg:
        for byte in "\N{SNOWMAN}\n".encode():
            await bounded(wg.raw(bytes([byte])))
    assert capfd.readouterr().out == "[talk:0] \N{SNOWMAN}\n"


async def test_more_words_than_a_pipe_holds_block_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    async with group(Talker, 1, name="talk") as wg:
        await bounded(wg.lines(3000, 100))
    assert len(capfd.readouterr().out.splitlines()) == 3000


async def test_inherited_output_is_not_touched(capfd: pytest.CaptureFixture[str]) -> None:
    async with group(Talker, 1, name="talk", output="inherit") as wg:
        await bounded(wg.pieces())
    out, err = capfd.readouterr()
    assert (out, err) == ("abc\n", "to stderr\n")


async def test_a_folder_gets_a_file_per_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "logs"
    async with group(Talker, 2, name="talk", output=folder) as wg:
        await bounded(wg.lines(2, 5))
    assert sorted(os.listdir(folder)) == ["talk-0.log", "talk-1.log"]
    assert (folder / "talk-0.log").read_text() == "0-0-x\n0-1-x\n"
    assert (folder / "talk-1.log").read_text() == "1-0-x\n1-1-x\n"
    assert capfd.readouterr() == ("", "")


async def test_a_file_goes_on_where_an_earlier_group_has_ended(tmp_path: Path) -> None:
    for _ in range(2):
        async with group(Talker, 1, name="talk", output=tmp_path) as wg:
            await bounded(wg.lines(1, 5))
    assert (tmp_path / "talk-0.log").read_text() == "0-0-x\n" * 2
