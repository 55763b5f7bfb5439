"""The weight store: a folder whose files are named by their content."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo.workers.weights.bucket import STORE, Bucket, digest
from dapo.workers.weights.sender import WeightSender
from dapo.workers.weights.store import fetch, make_from_model

SHAPES = [("embed", (4, 8)), ("layer.0", (3, 8)), ("layer.1", (3, 8))]


class Publisher:
    """Rank 0 and its weights."""

    def __init__(self, store: Path) -> None:
        self.weights = {name: torch.full(shape, 1.0) for name, shape in SHAPES}
        self._sender = WeightSender(
            lambda: iter(self.weights.items()),
            SHAPES,
            dtype="float32",
            bucket_bytes=1,
            rank=0,
            device=torch.device("cpu"),
            store=str(store),
        )

    def publish(self, others: tuple[str, ...] = ()) -> list[Bucket]:
        self._sender.open(STORE, "", 1)
        buckets = [self._sender.gather(index) for index in range(self._sender.num_buckets)]
        written = self._sender.stored(others)
        return [
            replace(bucket, digest=found, file=file)
            for bucket, (found, file) in zip(buckets, written, strict=True)
            if bucket is not None
        ]


def test_only_what_changes_is_written_and_what_nobody_needs_is_deleted(tmp_path: Path) -> None:
    store, site = tmp_path / "store", tmp_path / "site"
    site.mkdir()
    publisher = Publisher(store)
    first = publisher.publish()
    assert first[1].file == first[2].file, "equal buckets are one file"
    for bucket in first:
        data = fetch(str(store), bucket, site).read_bytes()
        assert hashlib.sha256(data).hexdigest() == bucket.file
        assert digest(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == bucket.digest
    before = {file.name: file.stat().st_mtime_ns for file in store.iterdir()}
    (store / "notes.txt").write_text("of somebody else")
    publisher.weights["layer.1"] = torch.full((3, 8), 2.0)
    second = publisher.publish()
    assert [a.file == b.file for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert {file.name for file in store.iterdir()} == {bucket.file for bucket in second} | {"notes.txt"}
    assert all((store / bucket.file).stat().st_mtime_ns == before[bucket.file] for bucket in second[:2])
    publisher.weights["layer.0"] = torch.full((3, 8), 3.0)
    publisher.publish(others=(second[1].file,))
    assert (store / second[1].file).exists(), "an engine still fetches it"


def test_a_file_that_its_writer_did_not_finish_is_written_again(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    [bucket, *_] = publisher.publish()
    (tmp_path / bucket.file).write_bytes(b"half")
    publisher.publish()
    assert (tmp_path / bucket.file).stat().st_size == bucket.plan.num_bytes


def test_a_site_makes_what_its_own_model_has(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "store")
    model, site = tmp_path / "model", tmp_path / "site"
    model.mkdir()
    site.mkdir()
    save_file(publisher.weights, model / "model.safetensors")
    publisher.weights["layer.1"] = torch.full((3, 8), 2.0)
    made = []
    for bucket in publisher.publish():
        make_from_model(str(model), bucket, site)
        made.append((site / bucket.file).exists())
    assert made == [True, True, False]


@pytest.mark.parametrize("change", ["other", "longer", "shorter"])
def test_a_changed_bucket_is_refused_and_leaves_nothing_behind(tmp_path: Path, change: str) -> None:
    store, site = tmp_path / "store", tmp_path / "site"
    site.mkdir()
    [bucket, *_] = Publisher(store).publish()
    file = store / bucket.file
    data = file.read_bytes()
    file.write_bytes({"other": b"\1" + data[1:], "longer": data + bytes(1 << 22), "shorter": data[:-8]}[change])
    with pytest.raises(ValueError, match="other bytes than its name says"):
        fetch(str(store), bucket, site)
    assert [*site.iterdir()] == []
    file.write_bytes(data)
    assert fetch(str(store), bucket, site).read_bytes() == data


@pytest.mark.parametrize("name", ["../secret", "", "0" * 63, "/etc/passwd"])
def test_only_names_of_buckets_are_read(tmp_path: Path, name: str) -> None:
    [bucket, *_] = Publisher(tmp_path / "store").publish()
    with pytest.raises(ValueError, match="no SHA-256"):
        fetch(str(tmp_path / "store"), replace(bucket, file=name), tmp_path)
