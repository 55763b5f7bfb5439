"""Damage of every kind, to every kind of file, is found and named before anything is read, and the checkpoint before it
is taken."""

import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo.state import manifest
from dapo.state.checkpoint import BrokenCheckpoint, CheckpointStore, verify
from dapo.state.manifest import Unreadable
from tests.support.state.claims import fails, write

FILES = ("actor/.metadata", "actor/__0_0.distcp", "hf/model.safetensors", "driver.json")


def save(store: CheckpointStore, step: int, text: str = "weights") -> None:
    write(store, step, {name: f"{text} of {name} at step {step}" for name in FILES})


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


OF_A_FILE = {
    "bit-flipped": (flip, "sha256 differs"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes where \d+ were written"),
    "zero-length": (lambda path: path.write_bytes(b""), "has 0 bytes where"),
    "missing": (Path.unlink, "cannot be read"),
    "renamed": (lambda path: path.rename(path.with_name("other")), "cannot be read"),
}
GONE = "is missing or cannot be read"
OF_THE_MANIFEST = {
    "missing": (Path.unlink, GONE),
    "zero-length": (lambda path: path.write_bytes(b""), GONE),
    "cut": (lambda path: path.write_text(path.read_text()[:40]), GONE),
    "bit-flipped": (flip, GONE),
}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [pytest.param(name, *of, id=f"{name}-{kind}") for name in FILES for kind, of in OF_A_FILE.items()]
    + [pytest.param("manifest.json", *of, id=f"manifest-{kind}") for kind, of in OF_THE_MANIFEST.items()],
)
def test_damage_is_named_and_the_checkpoint_before_it_is_taken(name, damage, message, tmp_path, store, caplog):
    directory = tmp_path / "step_000010"
    damage(directory / name)
    with pytest.raises(BrokenCheckpoint, match=f"{(directory / name).parent}.*{message}"):
        verify(directory)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == directory.with_name("step_000005")
    assert sum("skipping a broken checkpoint" in line for line in caplog.messages) == 1
    save(store, 10, "new weights")  # the run comes by the same step again
    assert store.latest() == directory and "new weights" in (directory / FILES[1]).read_text()


def test_every_single_bit_of_the_manifest_that_means_something_counts(tmp_path, store):
    path = tmp_path / "step_000010" / "manifest.json"
    original = path.read_bytes()
    for place in range(len(original)):
        path.write_bytes(original[:place] + bytes([original[place] ^ 2]) + original[place + 1 :])
        with pytest.raises((BrokenCheckpoint, Unreadable)):
            verify(path.parent)
    path.write_bytes(original)
    verify(path.parent)


DIGEST_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("size", [3, 4])
def test_what_a_writer_has_hashed_is_not_read_back(size, tmp_path, monkeypatch):
    store, hashed = CheckpointStore(tmp_path, keep=3), []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))
    own = json.dumps({"shard": {"bytes": size, "sha256": DIGEST_OF_ABC}})
    files = {"actor/shard": "abc", "driver.json": "{}", "actor/rank0.sha256.json": own}
    if size == 4:
        with pytest.raises(BrokenCheckpoint, match="shard is not there with the 4 bytes that its writer counted"):
            write(store, 1, files)
        return
    write(store, 1, files)
    assert hashed == ["driver.json"]
    verify(tmp_path / "step_000001")
    assert not list(tmp_path.rglob("*.sha256.json"))
    (tmp_path / "step_000001" / "actor" / "shard").write_text("abd")
    with pytest.raises(BrokenCheckpoint, match="sha256 differs"):
        verify(tmp_path / "step_000001")


@pytest.mark.parametrize("version", [2, 99])
def test_one_of_another_version_of_dapo_is_not_broken(version, tmp_path, store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", version)
        save(store, 20, "weights")
    with pytest.raises(Unreadable, match=rf"step_000020.* has format {version}, and this one reads format 3"):
        CheckpointStore(tmp_path, keep=3).latest()
    assert (tmp_path / "step_000020").is_dir()


def of_step_10(name: str) -> Callable[[Path], bool]:
    """Files of this name in a directory that is or was to be step 10."""
    return lambda path: path.name == name and "step_000010" in str(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(
    ("owner", "read", "name"),
    [
        pytest.param(manifest, "_digest", "model.safetensors", id="content"),
        pytest.param(Path, "stat", "model.safetensors", id="size"),
        pytest.param(Path, "read_text", "manifest.json", id="manifest"),
    ],
)
def test_one_that_cannot_be_read_is_not_broken(owner, read, name, number, tmp_path, store):
    """A network file system may be gone for a minute; going on from step 5 would remove step 10 at step 6."""
    directory = tmp_path / "step_000010"
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, owner, read, 99, of=of_step_10(name), number=number)
        for _ in range(2):
            with pytest.raises(Unreadable, match=rf"{directory} cannot be read .*step_000010.*tried 4 times"):
                store.latest()
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, owner, read, 3, of=of_step_10(name), number=number)
        assert store.latest() == directory, "at a later try"


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_crash_left_is_not_removed_while_nobody_knows_what_is_whole(in_place, tmp_path, store):
    (tmp_path / "step_000010").rename(tmp_path / "step_000010.0badcafe.tmp")
    if in_place:
        save(CheckpointStore(tmp_path / "x", keep=0), 10, "other weights")
        (tmp_path / "x" / "step_000010").rename(tmp_path / "step_000010")
    there = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, manifest, "_digest", 99, of=of_step_10("model.safetensors"))
        with pytest.raises(Unreadable, match="step_000010.* cannot be read"):
            store.recover()
        assert sorted(path.name for path in tmp_path.rglob("*")) == there
    store.recover()
    assert store.latest() == tmp_path / "step_000010"
