"""Protocols of the models that a reward pool uses beside its functions."""

from collections.abc import Sequence
from typing import Protocol

from dapo.types import Prompt, Response
from workers.scoring.fleet import Fleet


class RewardModel(Protocol):
    """A model that scores, such as `workers.reward_model.RewardModelPool`; NaN if it cannot. fleet: its workers."""

    fleet: Fleet

    async def start(self, timeout_s: float) -> None: ...
    async def score(self, prompt: Prompt, response: Response) -> float: ...
    def stop(self) -> None: ...


class Judges(Protocol):
    """Self-hosted judges that async functions call: `workers.judge.JudgePool`. failure: why no judge is left, or "".
    servers: the `url`, `key` and start number (`start`) of each serving judge. there: the same, but waits for one.
    heard: waits until each serving judge has answered a probe or is lost."""

    failure: str

    @property
    def restarts(self) -> int: ...
    async def start(self, timeout_s: float) -> None: ...
    def servers(self) -> Sequence[dict[str, str]]: ...
    async def there(self) -> Sequence[dict[str, str]]: ...
    async def heard(self) -> None: ...
    def stop(self) -> None: ...
