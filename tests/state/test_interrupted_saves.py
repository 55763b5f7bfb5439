"""A save that is killed, fails or is cancelled at any moment leaves a whole checkpoint, and two saves do not mix."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo.state import checkpoint, manifest
from dapo.state.checkpoint import CheckpointStore


async def write(store: CheckpointStore, step: int, text: str) -> None:
    async with store.writing(step) as directory:
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_text(text)


def text_of(store: CheckpointStore) -> str | None:
    found = store.latest()
    return None if found is None else (found / "actor" / "weights").read_text()


def steps_left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "LATEST")


class Killed(BaseException):
    """What stands for SIGKILL: from here on nothing is changed on disk any more, by no handler either."""


def die_at(count: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the process at the count-th rename, removal or flush."""
    left = count

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                raise Killed
            return function(*arguments, **options)

        return call

    for owner, name in ((Path, "replace"), (shutil, "rmtree"), (os, "fsync")):
        patch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("step", [3, 4])
def test_a_kill_at_every_moment_of_a_save_loses_nothing(step: int, tmp_path: Path) -> None:
    """Step 3 is written again over itself with keep=1: the old one is all that there is."""
    found: list[str | None] = []
    for at in range(1, 40):
        root = tmp_path / str(at)
        asyncio.run(write(CheckpointStore(root, keep=1), 3, "old"))
        killed = True
        with pytest.MonkeyPatch.context() as patch:
            die_at(at, patch)
            try:
                asyncio.run(write(CheckpointStore(root, keep=1), step, "new"))
                killed = False
            except Killed:
                pass
        store = CheckpointStore(root, keep=1)
        store.recover()
        found.append(text_of(store))
        assert found[-1] in ("old", "new"), f"killed at {at}"
        assert text_of(CheckpointStore(root, keep=1)) == found[-1], "what was recovered lasts"
        assert set(steps_left(root)) <= {"step_000003", "step_000004"}, "no left-over remains"
        asyncio.run(write(store, step, "newest"))
        assert text_of(store) == "newest"
        if not killed:
            break
    assert not killed and at > 8
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"}, (
        "from some moment on it is the new one"
    )


def interrupted(
    root: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException, keep: int = 3
) -> CheckpointStore:
    """A store whose next rename of a checkpoint's directory that ends in `at` fails."""
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith("step_") and self.name.endswith(at):
            monkeypatch.setattr(Path, "replace", replace)
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    return CheckpointStore(root, keep=keep)


@pytest.mark.parametrize("at", [".tmp", "step_000001"])
def test_a_rename_that_fails_brings_the_old_one_back(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(write(CheckpointStore(tmp_path, keep=3), 1, "old"))
    store = interrupted(tmp_path, monkeypatch, at, OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        asyncio.run(write(store, 1, "new"))
    assert steps_left(tmp_path) == ["step_000001"] and text_of(store) == "old"


def test_a_full_disk_at_latest_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_text", full)
    store = CheckpointStore(tmp_path, keep=3)
    asyncio.run(write(store, 1, "new"))
    assert text_of(store) == "new"


def test_an_old_one_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has made it immutable, say: saves that are whole would count as failed, until they end the run."""
    asyncio.run(write(CheckpointStore(tmp_path, keep=1), 1, "old"))
    store = interrupted(tmp_path, monkeypatch, "step_000001", PermissionError("immutable"), keep=1)
    asyncio.run(write(store, 2, "new"))
    assert steps_left(tmp_path) == ["step_000001", "step_000002"] and text_of(store) == "new"
    assert "step_000001 cannot be removed (immutable)" in caplog.text


def left_by_a_crash(root: Path, monkeypatch: pytest.MonkeyPatch, step: int, text: str, *, sealed: bool) -> Path:
    """A temporary directory as SIGKILL leaves it."""
    made = CheckpointStore(root.with_name("elsewhere"), keep=0)
    asyncio.run(write(made, step, text))
    temporary = root / f"step_{step:06d}.0badcafe.tmp"
    root.mkdir(exist_ok=True)
    (root.with_name("elsewhere") / f"step_{step:06d}").replace(temporary)
    if not sealed:
        (temporary / "manifest.json").unlink()
    return temporary


@pytest.mark.parametrize("before", [[], [1], [1, 2], [1, 3]])
def test_a_sealed_temporary_directory_counts(
    before: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for step in before:
        asyncio.run(write(CheckpointStore(root, keep=0), step, f"old {step}"))
    left_by_a_crash(root, monkeypatch, 2, "sealed", sealed=True)
    assert text_of(CheckpointStore(root, keep=0)) == (f"old {before[-1]}" if before else None), "a reader waits"
    store = CheckpointStore(root, keep=0)
    store.recover()
    assert text_of(store) == ("old 3" if 3 in before else "sealed")
    assert steps_left(root) == sorted({f"step_{step:06d}" for step in [*before, 2]})


@pytest.mark.parametrize("damage", ["unsealed", "changed"])
def test_half_a_temporary_directory_goes(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    asyncio.run(write(CheckpointStore(root, keep=0), 1, "old"))
    temporary = left_by_a_crash(root, monkeypatch, 2, "half", sealed=damage == "changed")
    (temporary / "actor" / "weights").write_text("other")
    store = CheckpointStore(root, keep=0)
    store.recover()
    assert text_of(store) == "old" and steps_left(root) == ["step_000001"]


@pytest.mark.parametrize(
    ("in_place", "left"),
    [
        pytest.param(None, "aside", id="nothing"),
        pytest.param("new", "new", id="whole"),
        pytest.param("broken", "aside", id="broken"),
    ],
)
def test_what_was_moved_aside_comes_back_unless_a_whole_one_is_in_its_place(
    in_place: str | None, left: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    asyncio.run(write(store, 1, "aside"))
    (tmp_path / "step_000001").rename(tmp_path / "step_000001.aside")
    if in_place:
        asyncio.run(write(CheckpointStore(tmp_path / "x", keep=0), 1, "new"))
        (tmp_path / "x" / "step_000001").rename(tmp_path / "step_000001")
    if in_place == "broken":
        (tmp_path / "step_000001" / "actor" / "weights").write_text("bad")
    store = CheckpointStore(tmp_path, keep=0)
    store.recover()
    assert text_of(store) == left
    assert set(steps_left(tmp_path)) == {"step_000001", *(["x"] if in_place else [])}


def test_what_was_being_removed_never_returns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    asyncio.run(write(store, 1, "kept"))
    asyncio.run(write(store, 9, "condemned"))
    (tmp_path / "step_000009").rename(tmp_path / "step_000009.0badcafe.gone")
    store = CheckpointStore(tmp_path, keep=0)
    store.recover()
    assert text_of(store) == "kept" and steps_left(tmp_path) == ["step_000001"]


def test_a_recovered_checkpoint_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_a_crash(tmp_path / "root", monkeypatch, 2, "sealed", sealed=True)
    hashed: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))
    store = CheckpointStore(tmp_path / "root", keep=0)
    store.recover()
    assert text_of(store) == "sealed" and hashed == ["weights"]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    store, order = CheckpointStore(tmp_path, keep=0), []

    async def slow(text: str) -> None:
        async with store.writing(1) as directory:
            order.append(f"begin {text}")
            await asyncio.sleep(0.05)
            assert directory.is_dir(), "nobody removed it meanwhile"
            (directory / "actor").mkdir()
            (directory / "actor" / "weights").write_text(text)
        order.append(f"end {text}")

    async def both() -> None:
        await asyncio.gather(slow("first"), slow("second"))

    asyncio.run(both())
    assert order == ["begin first", "begin second", "end first", "end second"] or order == [
        "begin first",
        "end first",
        "begin second",
        "end second",
    ]
    assert text_of(store) == "second" and steps_left(tmp_path) == ["step_000001"]


def during_seal(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    seal = checkpoint.seal

    def sealing(directory: Path) -> None:
        act()
        seal(directory)

    monkeypatch.setattr(checkpoint, "seal", sealing)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_cancellation_while_it_is_sealed_does_not_undo_it(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal: everything is written already, and a thread that hashes cannot be stopped."""
    store = CheckpointStore(tmp_path, keep=0)

    async def run() -> None:
        loop, saving = asyncio.get_running_loop(), asyncio.create_task(write(store, 1, "new"))

        def cancel() -> None:
            for _ in range(times):
                asyncio.run_coroutine_threadsafe(cancelled(), loop).result(timeout=10)

        async def cancelled() -> None:
            saving.cancel()
            await asyncio.sleep(0.01)

        during_seal(monkeypatch, cancel)
        with pytest.raises(asyncio.CancelledError):
            await saving
        await write(store, 2, "next")  # the lock is free again

    asyncio.run(run())
    assert steps_left(tmp_path) == ["step_000001", "step_000002"]
    assert (tmp_path / "step_000001" / "actor" / "weights").read_text() == "new"


def test_a_cancellation_in_the_body_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)

    async def body() -> None:
        async with store.writing(1) as directory:
            (directory / "half").write_text("x")
            await asyncio.sleep(60)

    async def run() -> None:
        saving = asyncio.create_task(body())
        await asyncio.sleep(0.02)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving

    asyncio.run(run())
    assert steps_left(tmp_path) == []
