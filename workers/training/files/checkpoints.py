"""Calls all ranks to write and read files, each call with the deadline `checkpoint.timeout_s`; a base class of
`workers.actor.ActorPool`. All ranks must see the directories.

    save, export_hf: the ranks write, and do nothing else meanwhile
    stage ─▶ write_staged: the ranks copy their state, and write the copy in a thread (`THREAD`) during updates
"""

import asyncio
from typing import Any

from dapo.config.schema import Config
from workers.remote import RemoteError
from workers.training.files import state
from workers.training.ranks import Ranks, Submit

THREAD = "files"  # Ray's concurrency group


class Checkpoints:
    def __init__(self, cfg: Config, ranks: Ranks) -> None:
        self._cfg = cfg
        self._ranks = ranks

    async def check_shared(self, path: str, content: str) -> None:
        """Raises RemoteError unless all ranks read `content` in the file that the driver wrote."""
        answers = await self._checkpoint(lambda _, worker: worker.read_file.remote(path), f"reading {path}")
        if others := {f"{host} ({text[:200]})": None for host, text in answers if text != content}:
            raise RemoteError(
                f"`trainer.output_dir`: actor ranks on {', '.join(others)} do not see {path} as the driver has written "
                "it; give a directory on a file system that all nodes share"
            )

    async def save(self, directory: str, version: int) -> None:
        """Writes the state of policy `version` into `directory`. Raises RemoteError also if the weights are of another
        version or the driver does not see a written file; ActorsLost also if parameter copies differ."""
        what = f"saving {directory}"
        await self._checkpoint(lambda _, worker: worker.save.remote(directory, version), what)
        await _check_written(directory, what)

    async def stage(self, version: int, *, export: bool) -> None:
        """Copies the state of policy `version` to host memory, for one `write_staged`; with `export` also the whole
        model, on rank 0. Raises as `save` does."""
        what = f"copying policy version {version} to host memory"
        await self._checkpoint(lambda _, worker: worker.stage.remote(version, export=export), what)

    async def write_staged(self, directory: str, export: str) -> None:
        """Writes the last staged copy; updates may run meanwhile. export: the directory of the export."""
        what = f"saving {directory}"
        await self._checkpoint(
            lambda _, worker: worker.write_staged.options(concurrency_group=THREAD).remote(directory, export),
            what,
            beside=True,
        )
        await _check_written(directory, what)

    async def load(self, directory: str, version: int) -> None:
        """Reads a checkpoint of `save`, possibly of another number of ranks; sets the policy version."""
        await self._checkpoint(lambda _, worker: worker.load.remote(directory, version), f"loading {directory}")

    async def export_hf(self, directory: str) -> None:
        await self._checkpoint(lambda _, worker: worker.export_hf.remote(directory), f"the export to {directory}")

    async def _checkpoint(self, submit: Submit, what: str, *, beside: bool = False) -> list[Any]:
        timeout_s, key = self._cfg.checkpoint.timeout_s, "checkpoint.timeout_s"
        return await self._ranks.call(submit, timeout_s, what, key, beside=beside)


async def _check_written(directory: str, what: str) -> None:
    """Raises RemoteError if this process does not see all files that the ranks have written."""
    if missing := await asyncio.to_thread(state.missing_shards, directory):
        raise RemoteError(
            f"{what}: {', '.join(missing[:4])} ({len(missing)} in all) of the actors' files are not there, or cut "
            "off; give a `trainer.output_dir` on a file system that all nodes share"
        )
