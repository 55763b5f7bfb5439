"""`dapo scale`: the file that it writes, and what the driver makes of it; with engines: end_to_end/test_scale."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest

from dapo.driver import scaling
from dapo.driver.scaling import Scaling
from dapo.state.fleet_size import WANTED, want_engines
from dapo.tools.scale import main
from dapo.workers.remote import RemoteError


class Engines:
    """Those of a pool, of which number 1 is lost as it leaves."""

    def __init__(self, count: int) -> None:
        self.there = {number: "ab"[number % 2] for number in range(count)}
        self.left: list[tuple[int, float]] = []
        self.going: dict[str, float] = {}
        self.nodes: list[str] = []

    async def join(self) -> None:
        await asyncio.sleep(0.05)  # for a place
        self.there[max(self.there) + 1] = "c"

    async def leave(self, number: int, seconds: float) -> None:
        self.left.append((number, seconds))
        del self.there[number]
        if number == 1:
            raise RemoteError("lost")


def follow(count: int, wanted: list[str], folder: Path, going: dict[str, float] | None = None) -> Engines:
    """After each of the file's texts in turn."""
    engines = Engines(count)
    engines.going = going or {}

    async def run() -> None:
        following = Scaling(
            lambda: engines.there,
            engines.join,
            engines.leave,
            lambda line: None,
            wanted=count,
            leave_s=30.0,
            going=lambda: engines.going,
            on_going=engines.nodes.append,
        )
        task = asyncio.create_task(following.follow(folder))
        for text in wanted:
            (folder / WANTED).write_text(text)
            await asyncio.sleep(0.2)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    return engines


def write_config(folder: Path, least: int, colocate: str, only: str) -> None:
    text = f"rollout: {{min_engines: {least}}}\ntrainer: {{colocate: {colocate}, only: {only}}}\n"
    (folder / "config.yaml").write_text(text)


def test_engines_join_and_leave_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "POLL_S", 0.01)
    engines = follow(2, ["3", "3\n", "5"], tmp_path)
    assert [*engines.there] == [0, 1, 2, 3, 4] and engines.left == []
    engines = follow(3, ["1"], tmp_path)
    assert [*engines.there] == [0] and engines.left == [(2, 30.0), (1, 30.0)]


def test_engines_leave_a_node_that_goes_and_others_join_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "POLL_S", 0.01)
    engines = follow(4, [""], tmp_path, going={"a": 25.0, "elsewhere": 5.0})
    assert engines.there == {1: "b", 3: "b", 4: "c", 5: "c"} and engines.left == [(0, 15.0), (2, 15.0)]
    assert sorted(engines.nodes) == ["a", "elsewhere"], "each is told once"


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (None, "engines=2", "is not the directory of a run"),
        ((2, "none", "both"), "engines=1", r"`rollout.min_engines` \(2\)"),
        ((1, "time", "both"), "engines=2", r"`trainer.colocate` \(time\)"),
        ((1, "none", "train"), "engines=2", r"`trainer.only` \(train\)"),
        ((1, "none", "both"), "engines=two", "must be engines=N"),
    ],
)
def test_what_cannot_be_scaled_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: tuple[int, str, str] | None, words: str, message: str
) -> None:
    if config is not None:
        write_config(tmp_path, *config)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), words])
    assert re.search(message, str(ended.value) + capsys.readouterr().err)
    assert not (tmp_path / WANTED).exists()


def test_the_command_writes_what_the_driver_reads(tmp_path: Path) -> None:
    write_config(tmp_path, 1, "none", "both")
    main([str(tmp_path), "engines=4"])
    assert (tmp_path / WANTED).read_text() == "4\n"
    want_engines(tmp_path, 2)
    assert (tmp_path / WANTED).read_text() == "2\n"
