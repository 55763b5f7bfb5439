"""Remembers, over all starts of a run, which groups must not be trained on, and which batches lost the ranks. A small
file in the output directory, which is on disk before the draws start again."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapo.ground.durable import tried, write_text
from dapo.types import Group

FILE = "voided.json"
DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A batch that must not be trained on. version: of its update. groups: (draw, version at its start, digest)."""

    version: int
    groups: list[tuple[int, int, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A batch (version, digest) whose update has lost the ranks, and how many times."""

    version: int
    batch: str
    times: int


class Voided:
    """refusals: how often each start of a draw was set aside, by (draw, policy version). Write errors only warn."""

    def __init__(self, output_dir: Path, *, warn: Callable[[str], None]) -> None:
        """Empty before `read`. warn: receives one line."""
        self.refusals: Counter[tuple[int, int]] = Counter()
        self._path = output_dir / FILE
        self._warn = warn
        self._batches: list[SetAside] = []
        self._losses: list[Loss] = []
        self._digests: set[str] = set()

    def read(self) -> None:
        """Loads what earlier starts wrote. Raises ValueError if the file cannot be read."""
        try:
            values: Any = json.loads(tried(lambda: self._path.read_text(encoding="utf-8")))
            batches = [SetAside(**each) for each in values["set_aside"]]
            losses = [Loss(**each) for each in values["losses"]]
            self._take(batches, losses)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{self._path} cannot be read ({error!r}): it names groups that must not be trained on; see to the "
                "disk and give the same command again; or remove it, and batches that were set aside may come again"
            ) from error

    def _take(self, batches: list[SetAside], losses: list[Loss]) -> None:
        self._batches, self._losses = batches, losses
        self.refusals.clear()
        groups = [group for each in batches for group in each.groups]
        self.refusals.update((index, started) for index, started, _ in groups)
        self._digests = {digest for _, _, digest in groups}

    def holds(self, group: Group) -> bool:
        return bool(self._digests) and _digest(group) in self._digests

    def add(self, groups: Sequence[tuple[Group, int]], version: int) -> None:
        """These groups, each with the policy version at its start, must not be trained on. version: of their update."""
        batch = SetAside(
            version=version, groups=[(group.draw.index, started, _digest(group)) for group, started in groups]
        )
        self._change([*self._batches, batch], [each for each in self._losses if each.version != version])

    def lost(self, groups: Sequence[Group], version: int) -> int:
        """Records that the update with these groups has lost the ranks. Returns how often, this time included."""
        batch = hashlib.blake2b("".join(map(_digest, groups)).encode(), digest_size=DIGEST_BYTES).hexdigest()
        before = [each for each in self._losses if (each.version, each.batch) == (version, batch)]
        loss = Loss(version=version, batch=batch, times=1 + sum(each.times for each in before))
        self._change(self._batches, [*(each for each in self._losses if each not in before), loss])
        return loss.times

    def trained(self, version: int) -> None:
        """The update from policy `version` is done: earlier losses with its batch, or before, were chance."""
        if any(each.version <= version for each in self._losses):
            self._change(self._batches, [each for each in self._losses if each.version > version])

    def prune(self, oldest: int) -> None:
        """Forgets updates before checkpoint `oldest`: no run goes back that far."""
        batches = [each for each in self._batches if each.version >= oldest]
        if len(batches) < len(self._batches):
            self._change(batches, self._losses)

    def _change(self, batches: list[SetAside], losses: list[Loss]) -> None:
        self._take(batches, losses)
        values = {"set_aside": [asdict(each) for each in batches], "losses": [asdict(each) for each in losses]}
        try:
            write_text(self._path, json.dumps(values) + "\n")
        except OSError as error:
            self._warn(
                f"{self._path} cannot be written ({error}); a start that goes on from here may train on groups that "
                "were set aside"
            )


def _digest(group: Group) -> str:
    """Of draw and tokens; scores may change when a run resumes."""
    digest = hashlib.blake2b(str(group.draw.index).encode(), digest_size=DIGEST_BYTES)
    for response in group.responses:
        digest.update(len(response.token_ids).to_bytes(8, "little"))
        digest.update(response.token_ids.tobytes())
    return digest.hexdigest()
