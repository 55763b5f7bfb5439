"""The order of the draws: each prompt once per epoch, a function of the index alone."""

import numpy as np

from dapo.data.prompts import PromptOrder
from dapo.types import Prompt


def prompts_of(count: int) -> list[Prompt]:
    ids = np.zeros(1, dtype=np.int32)
    return [
        Prompt(
            id=i, source="s", messages=(("user", str(i)),), text=str(i), token_ids=ids, ground_truth="1", extra_info={}
        )
        for i in range(count)
    ]


def test_order_visits_every_prompt_once_per_epoch_and_needs_only_the_index() -> None:
    prompts = prompts_of(50)
    order = PromptOrder(prompts, seed=3, shuffle=True)
    visits = [order.draw(index).prompt.id for index in range(150)]
    epochs = [visits[:50], visits[50:100], visits[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))
    again = PromptOrder(prompts, seed=3, shuffle=True)
    for index in (149, 0, 75, 74, 149):
        draw = again.draw(index)
        assert (draw.index, draw.prompt.id) == (index, visits[index])
    other = PromptOrder(prompts, seed=4, shuffle=True)
    assert [other.draw(index).prompt.id for index in range(50)] != epochs[0]


def test_order_without_shuffle_is_the_order_of_the_file() -> None:
    order = PromptOrder(prompts_of(3), seed=0, shuffle=False)
    assert [order.draw(index).prompt.id for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]
