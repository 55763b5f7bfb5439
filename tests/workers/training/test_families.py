"""Which families of models work, each against plain transformers; and what is refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dapo.config.rules.model import actor
from dapo.config.schema import Config
from dapo.types import TrainSequence
from dapo.workers.actor import ActorWorker, split_batch
from tests.support.training.model_families import FAMILIES, SIZES, Family, save_config, save_model
from tests.support.training.plain_reference import (
    NeverWaits,
    distance,
    full_gradients,
    full_weights,
    make_config,
    make_sequences,
    plain_gradients,
    plain_logprobs,
    rebuild,
    reference,
    train_batch,
)

LENGTHS = ((5, 9), (3, 1), (7, 14), (2, 6), (8, 4), (8, 1), (8, 3))  # the last three share a prompt
WORK = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]


def config_of(directory: Path) -> Config:
    cfg = make_config(directory, num_workers=1)
    cfg.data.max_prompt_length, cfg.data.max_response_length = 16, 48
    return cfg


def largest_difference(rank: ActorWorker, sequences: tuple[TrainSequence, ...], plain: torch.nn.Module) -> float:
    """Of the log-probabilities of sequences in one micro-batch."""
    with torch.no_grad():
        [found] = rank._updater._before([[rank._updater._collate(sequences)]])[0]
        wanted = torch.cat([plain_logprobs(plain, sequence) for sequence in sequences])
    assert wanted.abs().max() > 1e-5
    return float((found[0] - wanted).abs().max())


@pytest.mark.parametrize("name", WORK)
def test_a_family_that_works_gives_transformers_logprobs_and_gradients(
    rank: ActorWorker, tmp_path: Path, name: str
) -> None:
    save_model(FAMILIES[name], tmp_path)
    cfg = config_of(tmp_path)
    assert list(actor(cfg)) == []
    rebuild(rank, cfg)
    sequences = make_sequences(tmp_path, LENGTHS)
    plain = reference(tmp_path)
    assert largest_difference(rank, sequences, plain) <= 1e-5

    [work] = split_batch(train_batch(0, sequences), 1, 25)
    assert len(work.minibatches[0]) > 1
    with nullcontext() if name == "GPT-2" else NeverWaits():  # it looks for padding to warn of
        gradients = full_gradients(rank, work)
    assert distance(gradients, plain_gradients(plain, sequences)) <= 1e-5

    weights = full_weights(rank)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert weights.keys() == set(file.keys()), "engines get the names of the files"
        assert all(torch.equal(weight, file.get_tensor(name)) for name, weight in weights.items())
    if name in ("GPT-NeoX", "Mixtral"):  # whose files have other names than the modules
        rank.export_hf(str(tmp_path / "out"))
        ours, theirs = (dict(reference(path).named_parameters()) for path in (tmp_path / "out", tmp_path))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_attention_of_transformers_gets_a_prompt_for_each_response(rank: ActorWorker, tmp_path: Path) -> None:
    save_model(FAMILIES[WORK[0]], tmp_path)
    cfg = config_of(tmp_path)
    cfg.model.attn_implementation = "sdpa"
    rebuild(rank, cfg)
    assert largest_difference(rank, make_sequences(tmp_path, LENGTHS), reference(tmp_path)) <= 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_is_refused_before_any_worker_starts(tmp_path: Path, name: str) -> None:
    save_config(FAMILIES[name], tmp_path)
    problems = list(actor(config_of(tmp_path)))
    assert problems and problems[0].startswith(f"`model.path` ({tmp_path})"), problems
    assert FAMILIES[name].refused in problems[0]


@pytest.mark.parametrize(("original", "chosen"), [(16, "long_factor"), (64, "short_factor")])
def test_longrope_is_that_of_the_engines_window_whatever_is_packed_together(
    rank: ActorWorker, tmp_path: Path, original: int, chosen: str
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 12.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original}
    keys = {"max_position_embeddings": 128, "original_max_position_embeddings": original}
    save_model(Family("phi3", keys | {"rope_parameters": rope | factors}), tmp_path)
    rebuild(rank, config_of(tmp_path))  # engines have room for 64 tokens
    plain = reference(tmp_path)
    plain.config.rope_parameters |= dict.fromkeys(factors, factors[chosen])  # for sequences of any length
    plain.model.rotary_emb = type(plain.model.rotary_emb)(plain.config)
    sequences = make_sequences(tmp_path, LENGTHS)
    assert largest_difference(rank, sequences, plain) <= 1e-5
    assert largest_difference(rank, sequences[:2], plain) <= 1e-5


def test_a_window_shorter_than_a_sequence_and_weights_in_pickles_are_refused(tmp_path: Path) -> None:
    save_config(FAMILIES["Gemma 3 (text)"], tmp_path)
    cfg = config_of(tmp_path)
    cfg.data.max_response_length += 1
    cfg.actor.max_tokens_per_gpu += 1
    [problem] = actor(cfg)
    assert "see 64 tokens (sliding_window in config.json), fewer than" in problem
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    [problem] = actor(config_of(tmp_path))
    assert "holds pytorch_model.bin and no model.safetensors" in problem and "save_pretrained" in problem


@pytest.mark.parametrize(
    ("family", "message"),
    [
        pytest.param(Family("falcon_h1"), "FalconH1ForCausalLM keeps a state from token to token", id="recurrent"),
        pytest.param(Family("bloom"), "BloomForCausalLM computes attention by itself", id="own_attention"),
        pytest.param(Family("modernbert-decoder"), "ModernBertDecoderForCausalLM has more than a linear", id="head"),
        pytest.param(Family("gemma3", {"text_config": SIZES}), "Gemma3.* is not of text alone", id="images"),
    ],
)
def test_a_model_that_cannot_take_packed_sequences_is_refused_by_the_ranks(
    rank: ActorWorker, tmp_path: Path, family: Family, message: str
) -> None:
    save_config(family, tmp_path)
    with pytest.raises(ValueError, match=rf"^`model.path` \({tmp_path}\): {message}.*choose"):
        rebuild(rank, config_of(tmp_path))
