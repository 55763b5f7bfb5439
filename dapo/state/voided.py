"""Remembers, over all starts of a run, which groups must not be trained on, and which batches lost the ranks. A small
file in the output directory, which is on disk before the draws start again."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo.ground.durable import tried, write_text
from dapo.types import Group

FILE = "voided.json"
DIGEST_BYTES = 8

SetAside = tuple[int, int, int, str]  # version of the update, draw, version at its start, digest
Loss = tuple[int, str]  # version of the update, digest of the batch


class Voided:
    """refusals: how often each start of a draw was set aside, by (draw, policy version). Write errors only warn."""

    def __init__(self, output_dir: Path, *, warn: Callable[[str], None]) -> None:
        """Empty before `read`. warn: receives one line."""
        self.refusals: Counter[tuple[int, int]] = Counter()
        self._path = output_dir / FILE
        self._warn = warn
        self._groups: list[SetAside] = []
        self._losses: Counter[Loss] = Counter()

    def read(self) -> None:
        """Loads what earlier starts wrote. Raises ValueError if the file cannot be read."""
        try:
            values = json.loads(tried(lambda: self._path.read_text(encoding="utf-8")))
            groups = [(version, index, started, digest) for version, index, started, digest in values["set_aside"]]
            losses = Counter({(version, batch): times for version, batch, times in values["losses"]})
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self._path} cannot be read ({error!r}): it names groups that must not be trained on; see to the "
                "disk and give the same command again; or remove it, and batches that were set aside may come again"
            ) from error
        self._take(groups, losses)

    def _take(self, groups: list[SetAside], losses: Counter[Loss]) -> None:
        self._groups, self._losses = groups, losses
        self.refusals.clear()
        self.refusals.update((index, started) for _, index, started, _ in groups)

    def holds(self, group: Group) -> bool:
        return bool(self._groups) and _digest(group) in {digest for *_, digest in self._groups}

    def add(self, groups: Sequence[tuple[Group, int]], version: int) -> None:
        """These groups, each with the policy version at its start, must not be trained on. version: of their update."""
        added = [(version, group.draw.index, started, _digest(group)) for group, started in groups]
        self._change([*self._groups, *added], [loss for loss in self._losses if loss[0] != version])

    def lost(self, groups: Sequence[Group], version: int) -> int:
        """Records that the update with these groups has lost the ranks. Returns how often, this time included."""
        batch = hashlib.blake2b("".join(map(_digest, groups)).encode(), digest_size=DIGEST_BYTES).hexdigest()
        self._losses[version, batch] += 1
        self._change(self._groups, list(self._losses))
        return self._losses[version, batch]

    def trained(self, version: int) -> None:
        """The update from policy `version` is done: earlier losses with its batch, or before, were chance."""
        later = [loss for loss in self._losses if loss[0] > version]
        if len(later) < len(self._losses):
            self._change(self._groups, later)

    def _change(self, groups: list[SetAside], losses: Sequence[Loss]) -> None:
        self._take(groups, Counter({loss: self._losses[loss] for loss in losses}))
        values = {"set_aside": groups, "losses": [[*loss, times] for loss, times in self._losses.items()]}
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
