"""Damage of every kind, to every kind of file, is found and named before anything is read, and the checkpoint before it
is taken."""

import asyncio
import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo.state import durable, manifest
from dapo.state.checkpoint import BrokenCheckpoint, CheckpointStore, verify
from dapo.state.manifest import UnreadableCheckpoint

FILES = ("actor/.metadata", "actor/__0_0.distcp", "hf/model.safetensors", "driver.json")


def save(store: CheckpointStore, step: int, text: str = "weights") -> None:
    async def write() -> None:
        async with store.writing(step) as directory:
            for name in FILES:
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text(f"{text} of {name} at step {step}")

    asyncio.run(write())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 5)
    save(store, 10)
    return store


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def found(directory: Path, message: str, store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BrokenCheckpoint, match=message):
        verify(directory)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == directory.with_name("step_000005")
    assert sum("skipping a broken checkpoint" in record.message for record in caplog.records) == 1
    save(store, 10, "new weights")  # the run comes by the same step again
    assert store.latest() == directory and "new weights" in (directory / FILES[1]).read_text()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(flip, "sha256 differs", id="bit-flipped"),
        pytest.param(shorten, r"has \d+ bytes where \d+ were written", id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), "has 0 bytes where", id="zero-length"),
        pytest.param(Path.unlink, "cannot be read", id="missing"),
        pytest.param(lambda path: path.rename(path.with_name("other")), "is not listed", id="renamed"),
        pytest.param(lambda path: path.with_name(path.name + "2").touch(), "2 is not listed", id="added"),
    ],
)
def test_a_damaged_file(
    damage: Callable[[Path], Any],
    message: str,
    name: str,
    tmp_path: Path,
    store: CheckpointStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "step_000010" / name
    damage(path)
    found(tmp_path / "step_000010", f"{path.parent}.*{message}", store, caplog)


def edit(change: Callable[[dict[str, Any], str], Any]) -> Callable[[Path, str], None]:
    def edited(manifest: Path, name: str) -> None:
        content = json.loads(manifest.read_text())
        change(content["files"], name)
        manifest.write_text(json.dumps(content, indent=1))

    return edited


def edit_and_damage(manifest: Path, name: str) -> None:
    """The file is removed together with its entry: only the manifest itself can tell."""
    edit(lambda files, name: files.pop(name))(manifest, name)
    (manifest.parent / name).unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(edit(lambda files, name: files.pop(name)), id="entry-removed"),
        pytest.param(edit_and_damage, id="entry-and-file-removed"),
        pytest.param(edit(lambda files, name: files.update(other=files[name])), id="entry-added"),
        pytest.param(edit(lambda files, name: files[name].update(bytes=1)), id="size"),
        pytest.param(edit(lambda files, name: files[name].update(sha256="0" * 64)), id="digest"),
        pytest.param(edit(lambda files, name: files.update(other=files.pop(name))), id="entry-renamed"),
        pytest.param(edit(lambda files, name: files.update({name: 3})), id="entry-no-entry"),
    ],
)
def test_an_edited_manifest(
    change: Callable[[Path, str], None],
    name: str,
    tmp_path: Path,
    store: CheckpointStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(tmp_path / "step_000010" / "manifest.json", name)
    found(tmp_path / "step_000010", "manifest.json was changed after it was written", store, caplog)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(Path.unlink, "is missing or cannot be read", id="missing"),
        pytest.param(lambda path: path.write_bytes(b""), "is missing or cannot be read", id="zero-length"),
        pytest.param(lambda path: path.write_text(path.read_text()[:40]), "is missing or cannot be read", id="cut"),
        pytest.param(lambda path: path.write_text("[]"), "is missing or cannot be read", id="list"),
        pytest.param(flip, "is missing or cannot be read", id="bit-flipped"),
        pytest.param(
            lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99})),
            "was changed after it was written",
            id="another-format",
        ),
    ],
)
def test_a_damaged_manifest(
    damage: Callable[[Path], Any],
    message: str,
    tmp_path: Path,
    store: CheckpointStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(tmp_path / "step_000010" / "manifest.json")
    found(tmp_path / "step_000010", f"manifest.json {message}", store, caplog)


def test_every_single_bit_of_the_manifest_that_means_something_counts(tmp_path: Path, store: CheckpointStore) -> None:
    """A bit may only fall on white space, which is no content, or be seen."""
    manifest = tmp_path / "step_000010" / "manifest.json"
    original = manifest.read_bytes()
    for place in range(len(original)):
        manifest.write_bytes(original[:place] + bytes([original[place] ^ 2]) + original[place + 1 :])
        with pytest.raises(BrokenCheckpoint):
            verify(manifest.parent)
    manifest.write_bytes(original)
    verify(manifest.parent)


def test_ranks_that_do_not_share_the_directory_cannot_seal_a_checkpoint(tmp_path: Path) -> None:
    """The shard of a rank on another node is named by the metadata, and lies elsewhere."""
    store = CheckpointStore(tmp_path, keep=3)

    async def write() -> None:
        async with store.writing(1) as directory:
            (directory / "actor").mkdir()
            (directory / "actor" / ".metadata").write_bytes(b"\x80\x04\x8c\x0c__0_0.distcp\x8c\x0c__1_0.distcp.")
            (directory / "actor" / "__0_0.distcp").write_text("of rank 0")

    with pytest.raises(BrokenCheckpoint, match=r"actor lacks __1_0.distcp, .* all ranks must share `trainer.output_"):
        asyncio.run(write())
    assert list(tmp_path.iterdir()) == []


DIGEST_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("size", [3, 4])
def test_what_a_writer_has_hashed_is_not_read_back(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo.state import manifest

    store, hashed = CheckpointStore(tmp_path, keep=3), []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))

    async def write() -> None:
        async with store.writing(1) as directory:
            (directory / "actor").mkdir()
            (directory / "actor" / "shard").write_text("abc")
            (directory / "driver.json").write_text("{}")
            own = {"shard": {"bytes": size, "sha256": DIGEST_OF_ABC}}
            (directory / "actor" / "rank0.sha256.json").write_text(json.dumps(own))

    if size == 4:
        with pytest.raises(BrokenCheckpoint, match="shard is not there with the 4 bytes that its writer counted"):
            asyncio.run(write())
        return
    asyncio.run(write())
    assert hashed == ["driver.json"]
    verify(tmp_path / "step_000001")
    assert not list(tmp_path.rglob("*.sha256.json"))
    (tmp_path / "step_000001" / "actor" / "shard").write_text("abd")
    with pytest.raises(BrokenCheckpoint, match="sha256 differs"):
        verify(tmp_path / "step_000001")


def test_the_shards_of_a_real_distributed_checkpoint_are_found_in_its_metadata(tmp_path: Path) -> None:
    import torch
    from torch.distributed import checkpoint as dcp

    store = CheckpointStore(tmp_path, keep=3)

    async def write(*, lose: bool) -> None:
        async with store.writing(1) as directory:
            dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(directory / "actor"), no_dist=True)
            if lose:
                (directory / "actor" / "__0_0.distcp").unlink()

    asyncio.run(write(lose=False))
    verify(tmp_path / "step_000001")
    with pytest.raises(BrokenCheckpoint, match="actor lacks __0_0.distcp"):
        asyncio.run(write(lose=True))
    verify(tmp_path / "step_000001")


def fails(monkeypatch: pytest.MonkeyPatch, reader: str, name: str, number: int, times: int) -> None:
    """Lets reads of files of this name, in a directory that is or was to be step 10, fail so many times."""
    left = times
    owner, attribute = (Path, reader) if hasattr(Path, reader) else (manifest, reader)
    read = getattr(owner, attribute)

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        if path.name == name and "step_000010" in str(path) and left > 0:
            left -= 1
            raise OSError(number, "of the disk", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(durable, "WAIT_S", 0.0)
    monkeypatch.setattr(owner, attribute, failing)


@pytest.mark.parametrize("version", [2, 99])
def test_one_of_another_version_of_dapo_is_not_broken(
    version: int, tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", version)
        save(store, 20, "weights")
    again = CheckpointStore(tmp_path, keep=3)
    with pytest.raises(UnreadableCheckpoint, match=rf"step_000020.* has format {version}, and this one reads format 3"):
        again.latest()
    assert (tmp_path / "step_000020").is_dir()


READS = [("_digest", "model.safetensors"), ("stat", "model.safetensors"), ("read_text", "manifest.json"), ("rglob", "")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize(("reader", "name"), READS)
def test_one_that_cannot_be_read_is_not_broken(
    reader: str, name: str, number: int, tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of the network may be gone for a minute; going on from step 5 would remove step 10 at step 6."""
    directory = tmp_path / "step_000010"
    with monkeypatch.context() as patch:
        fails(patch, reader, name or directory.name, number, times=99)
        for _ in range(2):
            with pytest.raises(UnreadableCheckpoint, match=rf"{directory} cannot be read .*step_000010.*tried 4 times"):
                store.latest()
    assert store.latest() == directory, "nothing was taken for known"


@pytest.mark.parametrize(("reader", "name"), READS)
def test_one_that_can_be_read_at_a_later_try_is_whole(
    reader: str, name: str, tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, reader, name or "step_000010", errno.EIO, times=3)
    assert store.latest() == tmp_path / "step_000010"


@pytest.mark.parametrize("left", ["step_000010.0badcafe.tmp", "step_000010.aside"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_crash_left_is_not_removed_while_nobody_knows_what_is_whole(
    left: str, in_place: bool, tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step_000010").rename(tmp_path / left)
    if in_place:
        save(CheckpointStore(tmp_path / "x", keep=0), 10, "other weights")
        (tmp_path / "x" / "step_000010").rename(tmp_path / "step_000010")
    there = sorted(path.name for path in tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        fails(patch, "_digest", "model.safetensors", errno.EIO, times=99)
        if in_place or left.endswith(".tmp"):
            with pytest.raises(UnreadableCheckpoint, match="step_000010.* cannot be read"):
                store.recover()
            assert sorted(path.name for path in tmp_path.rglob("*")) == there
    store.recover()
    assert store.latest() == tmp_path / "step_000010"
