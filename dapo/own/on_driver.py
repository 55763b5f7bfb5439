"""Tries a person's own functions that the driver calls: advantages, weights of tokens, and the filter of groups.
Called by `dapo.own.check`."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dapo.config.schema import Config
from dapo.own.calls import own_advantages, own_token_weights
from dapo.own.loading import OwnFunction, OwnFunctionError
from dapo.sampling.outcome import MIXED, OUTCOMES
from dapo.types import Draw, Group, Prompt, Response, Score, VersionSpan

NAN = float("nan")
REWARDS = (  # of groups: mixed; with an unscorable response; of one reward; with one scored; short by a response
    (1.0, -1.0, -1.0, 1.0),
    (1.0, -1.0, -0.5, NAN),
    (1.0, 1.0, 1.0, 1.0),
    (NAN, NAN, 1.0, NAN),
    (0.3, -1.0, 0.8, NAN),
)
LENGTHS = ((3, 5, 2, 9), (4, 4, 7, 1), (6, 2, 2, 3), (1, 8, 5, 5), (7, 3, 4, 0))
SECOND_PART = ((0.0, -0.2, 0.0, -0.4), (0.0, 0.0, -0.1, 0.0), (0.0, -0.3, 0.0, 0.0), (0.0,) * 4, (-0.5, 0.0, -0.1, 0.0))
ACCURACIES = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0), (1.0,) * 4, (0.0,) * 4, (NAN,) * 4, (NAN, NAN, 1.0, 0.0))
ORDER, GROUPS = [2, 0, 3, 1], [3, 0, 4, 2, 1]  # others than they come in


def check_advantages(own: OwnFunction, cfg: Config) -> None:
    """Raises OwnFunctionError where advantages depend on order or padding, or train on what has no reward."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    second = torch.tensor(SECOND_PART, dtype=torch.float64)
    given = {
        "rewards": rewards,
        "lengths": torch.tensor(LENGTHS),
        "parts": torch.stack([rewards - second, second + 0 * rewards], dim=2),
        "part_weights": torch.ones(2, dtype=torch.float64),
    }

    def call(changed: dict[str, Tensor]) -> Tensor:
        copies = {name: values.clone() for name, values in changed.items()}
        found = own_advantages(own, **copies, normalize_by_std=cfg.algorithm.advantage.normalize_by_std)
        _unchanged(own, changed, copies)
        return found

    straight = call(given)
    if straight[rewards.isnan()].any():
        raise OwnFunctionError(f"{own.source} gives an advantage where the reward is NaN (unscorable); give 0 there")
    if not straight.any():
        raise OwnFunctionError(f"{own.source} gives advantage 0 to every response, also where rewards differ")
    _same(own, "gives other advantages for the same rewards", straight, call(given))
    turned = call(_each(given, lambda values: values[GROUPS]))
    _same(own, "depends on the order of the groups", straight[GROUPS], turned)
    turned = call(_each(given, lambda values: values[:, ORDER]))
    _same(own, "depends on the order of the responses in a group", straight[:, ORDER], turned)
    longer = {name: _padded(values, NAN if values.is_floating_point() else 0) for name, values in given.items()}
    padded = call(longer | {"part_weights": given["part_weights"]})
    _same(own, "depends on NaN that pads the rewards of shorter groups", straight, padded[:, :-1])
    call(_each(given, lambda values: values[:1]))  # a batch of one group
    call(given | {"rewards": torch.full_like(rewards, NAN), "parts": torch.full_like(given["parts"], NAN)})


def check_token_weights(own: OwnFunction, cfg: Config) -> None:
    """Raises OwnFunctionError where weights depend on order, are negative, or all 0."""
    lengths, sizes = torch.tensor([5, 3, 0, 7, 2, 4, 0, 1]), [3, 2, 3]

    def call(response_lengths: Tensor, group_sizes: list[int]) -> Tensor:
        copies, counts = response_lengths.clone(), list(group_sizes)
        mode, longest = cfg.algorithm.loss_agg_mode, cfg.data.max_response_length
        found = own_token_weights(own, copies, mode, group_sizes=counts, max_response_length=longest)
        _unchanged(own, {"response_lengths": response_lengths}, {"response_lengths": copies})
        if counts != group_sizes:
            raise OwnFunctionError(f"{own.source} changes `group_sizes` in place; change a copy")
        return found

    straight = call(lengths, sizes)
    if bool((straight < 0).any()):
        raise OwnFunctionError(f"{own.source} gives a weight below 0, which would train towards what was wrong")
    if not straight[lengths > 0].any():
        raise OwnFunctionError(f"{own.source} gives weight 0 to every token; nothing would be trained")
    _same(own, "gives other weights for the same lengths", straight, call(lengths, sizes))
    groups = torch.tensor([3, 4, 5, 6, 7, 0, 1, 2])
    _same(own, "depends on the order of the groups", straight[groups], call(lengths[groups], [2, 3, 3]))
    within = torch.tensor([1, 2, 0, 4, 3, 7, 5, 6])
    _same(own, "depends on the order of the responses in a group", straight[within], call(lengths[within], sizes))
    call(torch.zeros_like(lengths), sizes)  # overlong filtering may leave none


def check_filter(own: OwnFunction, cfg: Config) -> None:
    """Raises OwnFunctionError where the outcome is none, or depends on the order of the responses."""
    outcomes = []
    for number, accuracies in enumerate(ACCURACIES):
        group = _group(number, accuracies)
        before = repr(group)
        found = own(group=group, min_scored=cfg.filter_groups.min_scored)
        if not isinstance(found, str) or found not in OUTCOMES:
            raise OwnFunctionError(f"{own.source} gives {found!r} for a group; give one of {', '.join(OUTCOMES)}")
        if repr(group) != before:
            raise OwnFunctionError(f"{own.source} changes the group in place; change a copy")
        turned = _group(number, accuracies, order=ORDER)
        if own(group=turned, min_scored=cfg.filter_groups.min_scored) != found:
            raise OwnFunctionError(f"{own.source} depends on the order of the responses in a group, or keeps a state")
        outcomes.append(found)
    if MIXED not in outcomes:
        raise OwnFunctionError(
            f"{own.source} calls none of {len(ACCURACIES)} groups `{MIXED}`, one with accuracies {ACCURACIES[0]} among "
            "them; nothing would be trained"
        )


def _each(given: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Changes what is one per response."""
    return {name: values if name == "part_weights" else change(values) for name, values in given.items()}


def _padded(values: Tensor, with_what: float) -> Tensor:
    return torch.cat([values, torch.full_like(values[:, :1], with_what)], dim=1) if values.dim() > 1 else values


def _unchanged(own: OwnFunction, given: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, values in given.items():
        if not torch.allclose(values, after[name], rtol=0, atol=0, equal_nan=True):
            raise OwnFunctionError(f"{own.source} changes `{name}` in place; change a copy, or make a new tensor")


def _same(own: OwnFunction, what: str, one: Tensor, other: Tensor) -> None:
    if not torch.allclose(one, other, rtol=1e-5, atol=1e-9):
        raise OwnFunctionError(f"{own.source} {what}: by up to {float((one - other).abs().max()):.3g}")


def _group(number: int, accuracies: tuple[float, ...], order: list[int] | None = None) -> Group:
    """Returns a group of made-up responses; order: of its responses."""
    prompt = Prompt(
        id=number,
        source="check",
        messages=(("user", "1 + 1"),),
        text="1 + 1",
        token_ids=np.array([1, 2, 3], np.int32),
        ground_truth="2",
        extra_info={},
    )
    samples = range(len(accuracies)) if order is None else order
    return Group(
        draw=Draw(index=number, prompt=prompt),
        responses=tuple(_response(3 + sample) for sample in samples),
        scores=tuple(_score(accuracies[sample]) for sample in samples),
    )


def _response(length: int) -> Response:
    return Response(
        token_ids=np.arange(length, dtype=np.int32),
        rollout_logprobs=np.full(length, -1.0, np.float32),
        text="2",
        finish_reason="stop",
        policy_versions=(VersionSpan(version=0, start=0, end=length),),
        engine=0,
        seconds=1.0,
    )


def _score(accuracy: float) -> Score:
    reward = 2 * accuracy - 1
    failure = "error" if accuracy != accuracy else ""
    return Score(accuracy=accuracy, reward=reward, parts={"math": reward}, metrics={}, prediction="2", failure=failure)
