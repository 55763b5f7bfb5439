"""Defines what a reward pool asks of the models that score beside its functions."""

from collections.abc import Sequence
from typing import Protocol

from dapo.types import Prompt, Response
from workers.scoring.fleet import Fleet


class RewardModel(Protocol):
    """Stands for a model that scores, such as `workers.reward_model.RewardModelPool`; NaN where it cannot.

    fleet: its workers.
    """

    fleet: Fleet

    async def start(self, timeout_s: float) -> None: ...
    async def score(self, prompt: Prompt, response: Response) -> float: ...
    def stop(self) -> None: ...


class Judges(Protocol):
    """Stands for judges of the run's own, which the async functions ask: `workers.judge.JudgePool`.

    failure: why none is left, "" while one is. servers: the `url` and the `key` of each that serves, and the number of
    its `start`; there: the same, as soon as there is one. heard: returns when each that serves has shown that it does,
    or is lost.
    """

    failure: str

    @property
    def restarts(self) -> int: ...
    async def start(self, timeout_s: float) -> None: ...
    def servers(self) -> Sequence[dict[str, str]]: ...
    async def there(self) -> Sequence[dict[str, str]]: ...
    async def heard(self) -> None: ...
    def stop(self) -> None: ...
