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
from tests.support.state.claims import names, write, writing

WEIGHTS = "actor/weights"


def saved(root: Path, step: int, text: str, keep: int = 0) -> Path:
    write(CheckpointStore(root, keep=keep), step, {WEIGHTS: text})
    return root / f"step_{step:06d}"


def text_of(store: CheckpointStore) -> str | None:
    found = store.latest()
    return None if found is None else (found / WEIGHTS).read_text()


def recovered(root: Path, keep: int = 0) -> CheckpointStore:
    store = CheckpointStore(root, keep=keep)
    store.recover()
    return store


def steps_left(root: Path) -> list[str]:
    return [name for name in names(root) if name != "LATEST"]


class Killed(BaseException):
    """Stands for SIGKILL: from here on nothing is changed on disk any more, by no handler either."""


def die_at(count: int, patch: pytest.MonkeyPatch) -> None:
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
def test_a_kill_at_every_moment_of_a_save_loses_nothing(step, tmp_path):
    """Step 3 is written again over itself with keep=1: the old one is all that there is."""
    found: list[str | None] = []
    for at in range(1, 40):
        root = tmp_path / str(at)
        saved(root, 3, "old", keep=1)
        killed = True
        with pytest.MonkeyPatch.context() as patch:
            die_at(at, patch)
            try:
                saved(root, step, "new", keep=1)
                killed = False
            except Killed:
                pass
        store = recovered(root, keep=1)
        found.append(text_of(store))
        assert found[-1] in ("old", "new"), f"killed at {at}"
        assert text_of(CheckpointStore(root, keep=1)) == found[-1], "what was recovered lasts"
        assert set(steps_left(root)) <= {"step_000003", "step_000004"}, "no left-over remains"
        write(store, step, {WEIGHTS: "newest"})
        assert text_of(store) == "newest"
        if not killed:
            break
    assert not killed and at > 8
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"}, "the new one from some moment on"


def rename_fails(monkeypatch: pytest.MonkeyPatch, at: str, error: Exception) -> None:
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith("step_") and self.name.endswith(at):
            monkeypatch.setattr(Path, "replace", replace)
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)


@pytest.mark.parametrize("at", [".tmp", "step_000001"])
def test_a_rename_that_fails_brings_the_old_one_back(at, tmp_path, monkeypatch):
    saved(tmp_path, 1, "old")
    rename_fails(monkeypatch, at, OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        saved(tmp_path, 1, "new")
    assert steps_left(tmp_path) == ["step_000001"] and text_of(CheckpointStore(tmp_path, keep=0)) == "old"


def test_what_fails_after_the_commit_does_not_fail_the_save(tmp_path, monkeypatch, caplog):

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    saved(tmp_path, 1, "old")
    monkeypatch.setattr(checkpoint, "write_text", full)
    saved(tmp_path, 2, "new", keep=1)
    assert steps_left(tmp_path) == ["step_000001", "step_000002"]
    assert text_of(CheckpointStore(tmp_path, keep=0)) == "new"
    assert "step 2 is saved" in caplog.text and "No space left on device" in caplog.text


def left_by_a_crash(root: Path, step: int, text: str) -> Path:
    """A sealed temporary directory as SIGKILL leaves it."""
    root.mkdir(exist_ok=True)
    return saved(root.with_name("elsewhere"), step, text).rename(root / f"step_{step:06d}.0badcafe.tmp")


@pytest.mark.parametrize("before", [[], [1], [1, 2], [1, 3]])
def test_a_sealed_temporary_directory_counts(before, tmp_path, monkeypatch):
    root = tmp_path / "root"
    for step in before:
        saved(root, step, f"old {step}")
    left_by_a_crash(root, 2, "sealed")
    assert text_of(CheckpointStore(root, keep=0)) == (f"old {before[-1]}" if before else None), "a reader waits"
    hashed: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))
    assert text_of(recovered(root)) == ("old 3" if 3 in before else "sealed")
    assert len(hashed) == 1 + (3 in before), "each is hashed once"
    assert steps_left(root) == sorted({f"step_{step:06d}" for step in [*before, 2]})


@pytest.mark.parametrize("damage", ["unsealed", "changed", "being removed"])
def test_half_a_directory_goes(damage, tmp_path):
    root = tmp_path / "root"
    saved(root, 1, "old")
    temporary = left_by_a_crash(root, 2, "half")
    if damage == "changed":
        (temporary / WEIGHTS).write_text("other")
    elif damage == "unsealed":
        (temporary / "manifest.json").unlink()
    else:
        temporary.rename(root / "step_000002.0badcafe.gone")
    assert text_of(recovered(root)) == "old" and steps_left(root) == ["step_000001"]


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancellation_while_it_is_sealed_does_not_undo_it(times, tmp_path, monkeypatch):
    """Everything is written already, and a thread that hashes cannot be stopped."""
    store, seal = CheckpointStore(tmp_path, keep=0), checkpoint.seal

    async def run() -> None:
        loop, saving = asyncio.get_running_loop(), asyncio.create_task(writing(store, 1, {WEIGHTS: "new"}))

        async def cancelled() -> None:
            saving.cancel()
            await asyncio.sleep(0.01)

        def sealing(directory: Path) -> None:
            for _ in range(times):
                asyncio.run_coroutine_threadsafe(cancelled(), loop).result(timeout=10)
            monkeypatch.setattr(checkpoint, "seal", seal)
            seal(directory)

        monkeypatch.setattr(checkpoint, "seal", sealing)
        with pytest.raises(asyncio.CancelledError):
            await saving
        await writing(store, 2, {WEIGHTS: "next"})  # the lock is free again

    asyncio.run(run())
    assert steps_left(tmp_path) == ["step_000001", "step_000002"]
    assert (tmp_path / "step_000001" / WEIGHTS).read_text() == "new"


@pytest.mark.parametrize("how", [KeyboardInterrupt, asyncio.CancelledError, OSError])
def test_an_end_in_the_body_leaves_nothing(how, tmp_path):
    saved(tmp_path, 1, "old")

    async def fail() -> None:
        async with CheckpointStore(tmp_path, keep=0).writing(2) as directory:
            (directory / "half").write_text("x")
            raise how

    with pytest.raises(how):
        asyncio.run(fail())
    assert steps_left(tmp_path) == ["step_000001"]
