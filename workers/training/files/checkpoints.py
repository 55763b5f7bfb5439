"""Asks all ranks to write and read files, each call with the deadline `checkpoint.timeout_s`; the half of
`workers.actor.ActorPool` that is about them.

    save, export_hf: the ranks write, and do nothing else meanwhile
    stage ─▶ write_staged: the ranks copy their state, and write the copy in a thread (`THREAD`) beside updates

In: directories that all ranks see. Out: files there, and errors as those of every call to the ranks.
"""

import asyncio
from typing import Any

from dapo.config.schema import Config
from workers.remote import RemoteError
from workers.training.files import state
from workers.training.ranks import Ranks, Submit

THREAD = "files"  # Ray's concurrency group


class Checkpoints:
    """Speaks for all ranks where files are concerned."""

    def __init__(self, cfg: Config, ranks: Ranks) -> None:
        self._cfg = cfg
        self._ranks = ranks

    async def check_shared(self, path: str, content: str) -> None:
        """Raises RemoteError unless all ranks read `content` in the file at `path`, which the driver has written."""
        answers = await self._checkpoint(lambda _, worker: worker.read_file.remote(path), f"reading {path}")
        if others := {f"{host} ({text[:200]})": None for host, text in answers if text != content}:
            raise RemoteError(
                f"`trainer.output_dir`: actor ranks on {', '.join(others)} do not see {path} as the driver has written "
                "it; give a directory on a file system that all nodes share"
            )

    async def save(self, directory: str, version: int) -> None:
        """Writes the state of policy `version` into `directory`, which all ranks must see.

        Raises RemoteError also where the weights are of another version, or what some rank has written is not in the
        driver's directory; ActorsLost also where copies have drifted apart."""
        what = f"saving {directory}"
        await self._checkpoint(lambda _, worker: worker.save.remote(directory, version), what)
        await _check_written(directory, what)

    async def stage(self, version: int, *, export: bool) -> None:
        """Copies the state of policy `version` to the hosts' memory, for one `write_staged`.

        export: also the whole model, on rank 0. Raises as `save` does.
        """
        what = f"copying policy version {version} to host memory"
        await self._checkpoint(lambda _, worker: worker.stage.remote(version, export=export), what)

    async def write_staged(self, directory: str, export: str) -> None:
        """Writes what was staged last, the export into a directory of its own; updates may run meanwhile."""
        what = f"saving {directory}"
        await self._checkpoint(
            lambda _, worker: worker.write_staged.options(concurrency_group=THREAD).remote(directory, export),
            what,
            beside=True,
        )
        await _check_written(directory, what)

    async def load(self, directory: str, version: int) -> None:
        """Reads what `save` wrote, also by another number of ranks, which are then at policy `version`."""
        await self._checkpoint(lambda _, worker: worker.load.remote(directory, version), f"loading {directory}")

    async def export_hf(self, directory: str) -> None:
        """Writes the model as transformers and vLLM load it."""
        await self._checkpoint(lambda _, worker: worker.export_hf.remote(directory), f"the export to {directory}")

    async def _checkpoint(self, submit: Submit, what: str, *, beside: bool = False) -> list[Any]:
        timeout_s, key = self._cfg.checkpoint.timeout_s, "checkpoint.timeout_s"
        return await self._ranks.call(submit, timeout_s, what, key, beside=beside)


async def _check_written(directory: str, what: str) -> None:
    """Raises RemoteError where this process does not see what the ranks have written."""
    if missing := await asyncio.to_thread(state.missing_shards, directory):
        raise RemoteError(
            f"{what}: {', '.join(missing[:4])} ({len(missing)} in all) of the actors' files are not there, or cut "
            "off; give a `trainer.output_dir` on a file system that all nodes share"
        )
