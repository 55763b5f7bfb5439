"""Ranks that fail: which failures they outlive, what is refused afterwards, and what `restart` brings back.

The ranks, their process groups and their deadlines are real.
"""

import asyncio
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dapo.config.schema import Config
from dapo.pools import ActorsLost, BatchRefused
from dapo.types import TrainBatch, TrainSequence
from tests.support.training.plain_reference import (
    LENGTHS,
    VOCABULARY,
    checksum,
    make_config,
    make_model,
    make_sequences,
    on_all,
    save,
    start_own_pool,
    start_pool,
    train_batch,
    update,
    version_of,
)
from workers.actor import ActorPool
from workers.remote import RemoteError, wait
from workers.training import processes
from workers.training.files import state
from workers.training.processes import own_process

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TIMEOUT_S = 6.0  # of an update and of every collective, where a rank keeps silent


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> tuple[TrainSequence, ...]:
    return make_sequences(model_dir, LENGTHS)


@pytest.fixture
def pool(model_dir: Path) -> ActorPool:
    """Two ranks in their first state, which a test must leave able to go on."""
    return start_pool(make_config(model_dir, num_workers=2))


def other(sequences: tuple[TrainSequence, ...], first: float = np.nan, **fields: Any) -> tuple[TrainSequence, ...]:
    """The first of them has other rollout log-probabilities, or whatever is given."""
    logprobs = np.full_like(sequences[0].rollout_logprobs, first)
    return (dataclasses.replace(sequences[0], **(fields or {"rollout_logprobs": logprobs})), *sequences[1:])


def test_ranks_refuse_what_is_for_another_version_and_go_on(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    before = checksum(pool)
    with pytest.raises(RemoteError, match=r"Refused: .* an update of policy version 1: they are at version 0"):
        asyncio.run(pool.update(train_batch(1, sequences)))
    with pytest.raises(RemoteError, match=r"Refused: .* a checkpoint of policy version 1: they are at version 0"):
        asyncio.run(pool.save(str(tmp_path / "one"), 1))
    assert checksum(pool) == before and not (tmp_path / "one").exists()
    asyncio.run(pool.update(train_batch(0, sequences)))
    with pytest.raises(RemoteError, match=r"a checkpoint of policy version 0: they are at version 1"):
        asyncio.run(pool.save(str(tmp_path / "none"), 0))
    asyncio.run(pool.save(str(tmp_path / "one"), 1))
    asyncio.run(pool.load(str(tmp_path / "one"), 1))
    with pytest.raises(RemoteError, match=r"an update of policy version 0: they are at version 1"):
        asyncio.run(pool.update(train_batch(0, sequences)))


def test_an_update_that_the_driver_gave_up_on_is_not_saved_as_if_it_had_not_happened(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    async def give_up() -> None:
        async with asyncio.timeout(0.01):
            await pool.update(train_batch(0, *[sequences] * 8))

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    with pytest.raises(ActorsLost, match=r"cannot be used for saving .* the update from policy version 0 \(Cancelled"):
        asyncio.run(pool.save(str(tmp_path / "state"), 0))
    # Another driver's calls queue behind the update that is still running.
    refs = [worker.save.remote(str(tmp_path / "state"), 0) for worker in pool._workers]
    with pytest.raises(RemoteError, match="a checkpoint of policy version 0: they are at version 1"):
        asyncio.run(wait(refs, 600, "saving", "none"))
    assert on_all(pool, version_of) == [1, 1] and not (tmp_path / "state").exists()


@pytest.mark.parametrize("count", [1, 2], ids=["one_step", "two_steps"])
def test_a_refused_batch_leaves_nothing_behind(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], count: int
) -> None:
    """The batch after it is trained on as if the refused one had never been."""
    good = train_batch(0, sequences)
    shifted = tuple(dataclasses.replace(s, rollout_logprobs=s.rollout_logprobs + np.float32(0.2)) for s in sequences)
    with pytest.raises(BatchRefused, match=r"version 0: WeightParityError: .* is 0.2 over") as refused:
        asyncio.run(pool.update(train_batch(0, *[shifted] * count)))
    assert refused.value.reason == "parity"
    asyncio.run(pool.update(good))
    found = checksum(pool)
    fresh = start_pool(make_config(Path(pool._cfg.model.path), num_workers=2))
    asyncio.run(fresh.update(good))
    assert found == checksum(fresh)


def test_numbers_that_are_not_finite_skip_their_steps_and_are_named(
    pool: ActorPool, sequences: tuple[TrainSequence, ...]
) -> None:
    """Each mini-batch is one optimizer step; those that can be trained on are."""
    good = update(pool, train_batch(0, sequences))
    assert good["actor/skipped_steps"] == good["parity/non_finite_tokens"] == 0
    trained = checksum(pool)
    tokens = len(sequences[0].rollout_logprobs)
    for bad in (other(sequences), other(sequences, -np.inf), other(sequences, advantage=np.inf)):
        asyncio.run(start_pool(pool._cfg).update(train_batch(0, sequences)))
        again = start_pool(pool._cfg)
        updated = asyncio.run(again.update(train_batch(0, bad, sequences)))
        assert updated.skipped == (0,) and not updated.stop
        assert updated.metrics["actor/skipped_steps"] == updated.metrics["actor/optimizer_steps"] == 1
        assert updated.metrics["parity/non_finite_tokens"] == (0 if bad[0].advantage == np.inf else tokens)
        assert np.isfinite(updated.metrics["parity/mean_abs_logprob_diff"])
        assert on_all(again, version_of) == [1, 1], "an update of which a step was skipped counts"
        assert checksum(again) == trained


def spoil(worker: Any) -> None:
    """Runs on a rank: weights that make every log-probability NaN."""
    parameter = worker._policy.model.get_parameter("model.norm.weight").detach().to_local()
    parameter[:1] = np.nan


@pytest.mark.parametrize("count", [1, 2], ids=["one_step", "a_pass_before_the_first_step"])
def test_log_probabilities_of_the_actors_that_are_not_finite_skip_every_step(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], count: int
) -> None:
    on_all(pool, spoil)
    before = checksum(pool)
    updated = asyncio.run(pool.update(train_batch(0, *[sequences] * count)))
    assert updated.skipped == tuple(range(count)) and checksum(pool) == before
    assert updated.metrics["parity/non_finite_tokens"] == count * sum(response for _, response in LENGTHS)


def test_three_skipped_steps_in_a_row_stop_and_the_ranks_still_save(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    bad = other(sequences)
    before = checksum(pool)
    with pytest.raises(BatchRefused, match=r"NonFiniteError: 3 optimizer steps in a row were skipped") as refused:
        asyncio.run(pool.update(train_batch(0, bad, bad, bad, sequences)))
    assert refused.value.reason == "nonfinite" and checksum(pool) == before
    asyncio.run(pool.save(str(tmp_path / "zero"), 0))
    asyncio.run(pool.update(train_batch(0, sequences)))  # ends the row

    pool = start_pool(pool._cfg)
    updated = asyncio.run(pool.update(train_batch(0, sequences, bad, bad, bad, sequences)))
    assert updated.skipped == (1, 2, 3) and "3 optimizer steps in a row" in updated.stop
    assert updated.metrics["actor/optimizer_steps"] == 1, "none is taken after them"
    asyncio.run(pool.save(str(tmp_path / "one"), 1))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for next to nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_error_of_all_ranks_which_go_on(pool: ActorPool, full_disk: Path, tmp_path: Path) -> None:
    before = checksum(pool)
    for _ in range(2):
        with pytest.raises(RemoteError, match="FilesError: .*/state could not be written: .*No space left on device"):
            asyncio.run(pool.save(str(full_disk / "state"), 0))
        with pytest.raises(RemoteError, match="FilesError: .*/hf: actor rank 0: SafetensorError: .*No space left"):
            asyncio.run(pool.export_hf(str(full_disk / "hf")))
    asyncio.run(pool.save(str(tmp_path / "state"), 0))
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    asyncio.run(pool.load(str(tmp_path / "state"), 0))
    assert checksum(pool) == before


@pytest.mark.parametrize("method", ["save", "export_hf"])
def test_a_directory_that_cannot_be_made_is_one_error_of_all_ranks(
    pool: ActorPool, tmp_path: Path, method: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    place = str(tmp_path / "file" / "state")
    with pytest.raises(RemoteError, match=r"FilesError: .*(NotADirectoryError|FileExistsError): "):
        asyncio.run(pool.save(place, 0) if method == "save" else pool.export_hf(place))
    save(pool, tmp_path / "state")


def test_a_checkpoint_that_cannot_be_read_is_refused_until_another_is_loaded(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    save(pool, tmp_path / "state")
    with pytest.raises(RemoteError, match=r"FilesError: .*/none could not be loaded: .*FileNotFoundError|No such file"):
        asyncio.run(pool.load(str(tmp_path / "none"), 0))
    again = str(tmp_path / "again")
    attempts = (pool.update(train_batch(0, sequences)), pool.save(again, 0), pool.export_hf(again))
    for attempt in (*attempts, pool.gather_bucket(0, "a bucket")):
        with pytest.raises(RemoteError, match="Refused: .* of no policy version; load a checkpoint"):
            asyncio.run(attempt)
    asyncio.run(pool.load(str(tmp_path / "state"), 0))
    asyncio.run(pool.update(train_batch(0, sequences)))


def test_files_that_ranks_do_not_share_with_the_driver_are_found(pool: ActorPool, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("this run")
    asyncio.run(pool.check_shared(str(token), "this run"))
    for path, content, shown in ((token, "that run", "this run"), (tmp_path / "none", "this run", "FileNotFoundError")):
        with pytest.raises(RemoteError, match=rf"`trainer.output_dir`: actor ranks on [0-9.]+ \({shown}.* do not see"):
            asyncio.run(pool.check_shared(str(path), content))
    save(pool, tmp_path / "state")
    assert state.missing_shards(str(tmp_path / "state")) == []


@pytest.mark.parametrize("harm", ["remove", "truncate", "metadata"])
def test_a_checkpoint_without_some_ranks_files_is_not_taken_for_saved(
    pool: ActorPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    directory = tmp_path / "state"
    whole = state.missing_shards
    hurt = directory / (".metadata" if harm == "metadata" else "__1_0.distcp")

    def missing(place: str) -> list[str]:
        hurt.write_bytes(hurt.read_bytes()[:100]) if harm == "truncate" else hurt.unlink()
        return whole(place)

    monkeypatch.setattr(state, "missing_shards", missing)
    with pytest.raises(RemoteError, match=rf"saving .*: {hurt.name} \(1 in all\) .* `trainer.output_dir`"):
        save(pool, directory)


def timeouts(worker: Any) -> set[float]:
    """Runs on a rank: of all its process groups, in seconds."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) >= 5, "all ranks, again for files, copies, shards, and those that share a sequence"
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_every_process_group_has_the_deadline_of_an_update_or_of_a_checkpoint(
    model_dir: Path, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    """Those that FSDP, the optimizer or a checkpoint may have made too."""
    cfg = make_config(model_dir, num_workers=4, fsdp_size=2, ulysses_sequence_parallel_size=2, timeout_s=1234.0)
    cfg.checkpoint.timeout_s = 2345.0
    pool = start_own_pool(cfg)
    try:
        asyncio.run(pool.update(train_batch(0, sequences)))
        asyncio.run(pool.save(str(tmp_path / "state"), 1))
        asyncio.run(pool.load(str(tmp_path / "state"), 1))
        asyncio.run(pool.export_hf(str(tmp_path / "hf")))
        assert on_all(pool, timeouts) == [{1234.0, 2345.0}] * 4
    finally:
        pool.close()


def killed(pool: ActorPool, good: TrainBatch) -> None:
    os.kill(pool._ranks._processes[1].pid, signal.SIGKILL)
    asyncio.run(pool.update(good))


def stopped(pool: ActorPool, good: TrainBatch) -> None:
    os.kill(pool._ranks._processes[1].pid, signal.SIGSTOP)
    asyncio.run(pool.update(good))


def stuck(pool: ActorPool, good: TrainBatch) -> None:
    """Rank 0 waits in a collective for rank 1, which does not come."""
    pool._workers[1].__ray_call__.remote(lambda worker: time.sleep(600))
    asyncio.run(pool.update(good))


def failed(pool: ActorPool, good: TrainBatch) -> None:
    sequences = good.minibatches[0]
    broken = dataclasses.replace(sequences[0], token_ids=sequences[0].token_ids + VOCABULARY)
    asyncio.run(pool.update(dataclasses.replace(good, minibatches=((broken, *sequences[1:]),))))


def half_done(pool: ActorPool, good: TrainBatch) -> None:
    """All ranks raise the same, behind the first of two optimizer steps."""
    on_all(pool, fail_in_the_second_step)
    minibatches = good.minibatches * 2
    asyncio.run(pool.update(dataclasses.replace(good, minibatches=minibatches, order=(0, 1))))


def fail_in_the_second_step(worker: Any) -> None:
    """Runs on a rank."""
    step, steps = worker._optimizer.step, []

    def failing() -> None:
        steps.append(None)
        if len(steps) == 2:
            raise RuntimeError("the machine is faulty")
        step()

    worker._optimizer.step = failing


def idle(signal_number: int) -> Callable[[ActorPool, TrainBatch], None]:
    """What ends a rank while nothing is asked of it."""

    def fault(pool: ActorPool, batch: TrainBatch) -> None:
        os.kill(pool._ranks._processes[1].pid, signal_number)
        raise ActorsLost(asyncio.run(pool.until_lost()))

    return fault


FAULTS = [
    pytest.param(killed, "actor rank 1 .*: ActorDiedError", 30.0, id="killed"),
    pytest.param(
        *(stopped, r"waited 6 s for actor rank 1 \(the update from policy version 1\)", 30.0),
        id="stopped",
        marks=pytest.mark.long,
    ),
    pytest.param(stuck, r"waited 6 s for actor rank 1 \(the update from policy version 1\)", 30.0, id="stuck"),
    pytest.param(failed, "IndexError: index", 30.0, id="failed"),
    pytest.param(half_done, "RuntimeError: the machine is faulty", 30.0, id="half_done", marks=pytest.mark.long),
    pytest.param(
        *(idle(signal.SIGKILL), "actor rank 1 .*: ActorDiedError", 30.0),
        id="killed while idle",
        marks=pytest.mark.long,
    ),
    pytest.param(
        idle(signal.SIGSTOP), r"waited 6 s for actor rank 1 \(a sign of life\)", 30.0, id="stopped while idle"
    ),
]


@pytest.fixture(scope="module")
def own(ray_cluster: None, model_dir: Path) -> Iterator[ActorPool]:
    """Ranks that are restarted again and again."""
    cfg: Config = make_config(model_dir, num_workers=2, timeout_s=TIMEOUT_S)
    pool = start_own_pool(cfg)
    yield pool
    pool.close()


@pytest.mark.parametrize(("fault", "message", "within_s"), FAULTS)
def test_after_a_restart_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    own: ActorPool,
    sequences: tuple[TrainSequence, ...],
    tmp_path: Path,
    fault: Callable[[ActorPool, TrainBatch], None],
    message: str,
    within_s: float,
) -> None:
    asyncio.run(own.restart())
    untrained = checksum(own)
    asyncio.run(own.update(train_batch(0, sequences)))
    asyncio.run(own.save(str(tmp_path / "state"), 1))
    saved = checksum(own)
    near = tuple(dataclasses.replace(s, staleness=np.ones_like(s.staleness)) for s in sequences)
    good = train_batch(1, near)
    asyncio.run(own.update(good))
    wanted = checksum(own)
    asyncio.run(own.load(str(tmp_path / "state"), 1))

    before = list(own._ranks._processes)
    began = time.monotonic()
    with pytest.raises(ActorsLost, match=message):
        fault(own, good)
    noticed = time.monotonic() - began
    for attempt in (own.update(good), own.save(str(tmp_path / "lost"), 1), own.export_hf(str(tmp_path / "lost"))):
        with pytest.raises(ActorsLost, match="lost before: .*" + message):
            asyncio.run(attempt)
    assert not (tmp_path / "lost").exists()

    asyncio.run(own.restart())
    print(f"noticed after {noticed:.1f} s, usable again after {time.monotonic() - began:.1f} s")
    assert noticed < within_s
    assert not [process for process in before if psutil.pid_exists(process.pid)]
    assert checksum(own) == untrained and on_all(own, version_of) == [0, 0]
    asyncio.run(own.load(str(tmp_path / "state"), 1))
    assert checksum(own) == saved
    asyncio.run(own.update(good))
    assert checksum(own) == wanted


def test_a_process_that_the_driver_does_not_see_is_ended_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is this one; the driver believes otherwise."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        here = own_process()
        monkeypatch.setattr(processes, "_own_space", lambda: "of another container")
        there = dataclasses.replace(here, pid=child.pid, started=processes._start_of(child.pid))
        asyncio.run(processes.end_all([there], 20.0, "key"))
        assert child.poll() == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_a_node_that_is_gone_took_its_processes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(own_process(), node="f" * 56, space="of another machine")
    began = time.monotonic()
    asyncio.run(processes.end_all([gone], 20.0, "key"))
    assert time.monotonic() - began < 20


def test_a_process_that_outlives_its_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "end_here", lambda those, timeout_s: [each.pid for each in those])
    here = own_process()
    with pytest.raises(RemoteError, match=rf"process {here.pid} on {here.host} did not end within 1 s .* \(`key`\)"):
        asyncio.run(processes.end_all([here], 1.0, "key"))
