"""Router replay on one rank: against loops over given experts in float64, and against the routers' own choice. On
several ranks: test_parity."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo.algorithm.mismatch import Variant
from dapo.types import TrainSequence
from dapo.workers.actor import ActorWorker, split_batch
from tests.support.training.model_families import FAMILIES, save_model
from tests.support.training.plain_experts import plain_mixture, with_random_experts
from tests.support.training.plain_reference import (
    distance,
    full_gradients,
    in_turns,
    make_config,
    make_sequences,
    plain_gradients,
    plain_logprobs,
    rebuild,
    reference,
    train_batch,
)

LENGTHS = ((5, 9), (3, 1), (7, 14), (2, 6), (8, 4), (8, 1), (8, 3))  # the last three share a prompt
MIXTURES = {name: family for name, family in FAMILIES.items() if "num_experts" in family.keys and not family.refused}
MIXTURES["Qwen3-MoE, normalised"] = dataclasses.replace(
    FAMILIES["Qwen3-MoE"], keys=FAMILIES["Qwen3-MoE"].keys | {"norm_topk_prob": True}
)
BOUND = 1e-5


def logprobs_of(rank: ActorWorker, sequences: tuple[TrainSequence, ...]) -> torch.Tensor:
    [found] = rank._updater._before([[rank._updater._collate(sequences)]])[0]
    return found[0]


def own_choice(directory: Path, sequences: tuple[TrainSequence, ...]) -> tuple[TrainSequence, ...]:
    """The sequences with the experts that transformers' routers choose, one sequence at a time."""
    model, chosen = reference(directory), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    found = []
    for sequence in sequences:
        chosen.clear()
        plain_logprobs(model, sequence)
        rows = torch.stack(chosen, dim=1)[:-1].numpy().astype(np.uint16)
        shared = sequence.num_prompt_tokens - 1
        found.append(dataclasses.replace(sequence, prompt_experts=rows[:shared], experts=rows[shared:]))
    return tuple(found)


@pytest.mark.parametrize("name", MIXTURES)
def test_given_experts_give_what_loops_over_them_give(rank: ActorWorker, tmp_path: Path, name: str) -> None:
    save_model(MIXTURES[name], tmp_path)
    rebuild(rank, make_config(tmp_path, num_workers=1))
    free = in_turns(make_sequences(tmp_path, LENGTHS))
    sequences = with_random_experts(free, layers=2, experts=4, k=2)
    plain = plain_mixture(tmp_path, sequences, torch.float64)
    with torch.no_grad():
        wanted = torch.cat([plain_logprobs(plain, sequence) for sequence in sequences])
    found = logprobs_of(rank, sequences)
    assert (found - wanted).abs().max() <= BOUND
    assert (found - logprobs_of(rank, free)).abs().max() > 0.01, "the routers would choose others"
    [work] = split_batch(train_batch(0, sequences), 1, 25)
    assert len(work.minibatches[0]) > 1
    assert distance(full_gradients(rank, work), plain_gradients(plain, sequences)) <= BOUND


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_own_choice_changes_no_bit(rank: ActorWorker, tmp_path: Path, name: str, checkpointing: str) -> None:
    save_model(MIXTURES[name], tmp_path)
    cfg = make_config(tmp_path, num_workers=1)
    cfg.model.gradient_checkpointing = checkpointing
    rebuild(rank, cfg)
    free = make_sequences(tmp_path, LENGTHS)
    replayed = own_choice(tmp_path, free)
    assert torch.equal(logprobs_of(rank, free), logprobs_of(rank, replayed))
    wanted, found = (full_gradients(rank, split_batch(train_batch(0, s), 1, 99)[0]) for s in (free, replayed))
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert all(found[name].any() for name in found if ".gate." in name), "the routers are trained"


def test_a_reference_chooses_itself_and_a_sequence_without_experts_too(rank: ActorWorker, tmp_path: Path) -> None:
    save_model(MIXTURES["Mixtral"], tmp_path)
    cfg = make_config(tmp_path, num_workers=1)
    cfg.algorithm.kl.loss_coeff = 0.1
    rebuild(rank, cfg)
    free = make_sequences(tmp_path, LENGTHS)
    given = with_random_experts(free, layers=2, experts=4, k=2)
    collate = rank._updater._collate
    assert collate(free).experts is None and collate(given).experts is not None
    [[found]] = rank._updater._reference_of([[collate(given)]])
    assert torch.equal(found, logprobs_of(rank, free)), "the reference is the policy at the start"
    [measured] = rank._updater.probe([given], Variant(own_experts=True))
    assert torch.equal(torch.cat(measured)[:, 0], found), "what replay removes can be measured"
    some = (given[0], free[1], *given[2:])
    apart, alone = logprobs_of(rank, some), logprobs_of(rank, free[1:2])
    assert (apart[LENGTHS[0][1] :][: LENGTHS[1][1]] - alone).abs().max() <= BOUND
    assert (apart[: LENGTHS[0][1]] - logprobs_of(rank, given)[: LENGTHS[0][1]]).abs().max() <= BOUND


def test_prompts_routed_otherwise_are_not_computed_once(rank: ActorWorker, tmp_path: Path) -> None:
    save_model(MIXTURES["OLMoE"], tmp_path)
    rebuild(rank, make_config(tmp_path, num_workers=1))
    one, other = with_random_experts(make_sequences(tmp_path, ((8, 4), (8, 3))), layers=2, experts=4, k=2)
    assert rank._updater._collate((one, other)).segments.prompts is not None
    changed = dataclasses.replace(other, prompt_experts=one.prompt_experts[::-1].copy())
    assert rank._updater._collate((one, changed)).segments.prompts is None
    separate = torch.cat([logprobs_of(rank, (sequence,)) for sequence in (one, changed)])
    assert (logprobs_of(rank, (one, changed)) - separate).abs().max() <= BOUND
