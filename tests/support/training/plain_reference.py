"""Tiny models and what plain transformers make of them, one sequence at a time; and ranks to compare with."""

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dapo.config.schema import Config
from dapo.types import Support, TrainBatch, TrainSequence
from tests.support.kept import end_with_the_group

if TYPE_CHECKING:  # Ray, which the tests on one GPU do without
    from dapo.pools import Updated
    from dapo.workers.actor import ActorPool, RankWork

VOCABULARY = 64
TEMPERATURE = 0.7
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
UPDATE_S, CHECKPOINT_S = 543.0, 2345.0  # deadlines that are nobody's default
LENGTHS = ((5, 9), (3, 1), (7, 14), (2, 6), (4, 4), (6, 11), (3, 8))  # (prompt, response)


def make_model(directory: Path, *, tied: bool, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.5,  # must not act
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms are constants otherwise
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    tokenizer.save_pretrained(directory)


def make_config(model: Path, **actor: Any) -> Config:
    cfg = Config()
    cfg.model.path = str(model)
    cfg.model.dtype = "float32"
    cfg.model.gradient_checkpointing = "none"
    cfg.rollout.temperature = TEMPERATURE
    cfg.actor = dataclasses.replace(cfg.actor, **{"max_tokens_per_gpu": 64, "timeout_s": UPDATE_S} | actor)
    cfg.checkpoint.timeout_s = CHECKPOINT_S
    cfg.actor.optim.lr = 3e-3
    cfg.actor.optim.eps = 1e-3  # Adam's first step is else the sign of the gradient, rounding included
    cfg.actor.optim.grad_clip = 0.05
    return cfg


def reference(model_dir: Path) -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def plain_logprobs(model: Qwen2ForCausalLM, sequence: TrainSequence) -> torch.Tensor:
    """[S] of one sequence on its own: of the tokens that the policy sampled."""
    tokens = torch.from_numpy(sequence.token_ids).long()
    logits = model(tokens[None]).logits[0, sequence.num_prompt_tokens - 1 : -1][sampled(sequence)] / TEMPERATURE
    if sequence.support is not None:
        left_out = torch.ones_like(logits, dtype=torch.bool)
        rows = np.repeat(np.arange(len(logits)), sequence.support.counts)
        left_out[rows, sequence.support.token_ids] = False
        logits = logits.masked_fill(left_out, -torch.inf)
    labels = tokens[sequence.num_prompt_tokens :, None][sampled(sequence)]
    return logits.log_softmax(-1).gather(1, labels)[:, 0]


def sampled(sequence: TrainSequence) -> torch.Tensor:
    """Which of the R response tokens the policy sampled, [R]."""
    if sequence.token_mask is not None:
        return torch.from_numpy(sequence.token_mask)
    return torch.ones(len(sequence.token_ids) - sequence.num_prompt_tokens, dtype=torch.bool)


def in_turns(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """The sequences, every other one of which holds two runs of tokens that the policy did not sample, if it is long
    enough."""
    found = []
    for index, sequence in enumerate(sequences):
        length = len(sequence.rollout_logprobs)
        mask = np.ones(length, np.bool_)
        if index % 2:
            mask[length // 4 : length // 2] = False
            mask[3 * length // 4 : length - 1] = False
        logprobs, staleness = sequence.rollout_logprobs[mask], sequence.staleness[mask]
        token_mask = mask if index % 2 else None
        found.append(
            dataclasses.replace(sequence, rollout_logprobs=logprobs, staleness=staleness, token_mask=token_mask)
        )
    assert any(one.token_mask is not None and not one.token_mask.all() for one in found)
    return tuple(found)


def cut(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """The sequences as if sampled from one to nine tokens at each position."""
    rng, found = np.random.default_rng(8), []
    for sequence in sequences:
        labels = sequence.token_ids[sequence.num_prompt_tokens :][sampled(sequence).numpy()]
        rows = [np.union1d(label, rng.integers(0, VOCABULARY, rng.integers(0, 9))) for label in labels]
        counts = np.array([len(row) for row in rows], np.uint16)
        support = Support(counts=counts, token_ids=np.concatenate([np.zeros(0, int), *rows]).astype(np.int32))
        found.append(dataclasses.replace(sequence, support=support))
    return tuple(found)


def make_sequences(model_dir: Path, lengths: Sequence[tuple[int, int]], seed: int = 0) -> tuple[TrainSequence, ...]:
    """Random sequences whose rollout log-probabilities are the model's own. Neighbours with as many prompt tokens have
    the same prompt."""
    rng = np.random.default_rng(seed)
    model = reference(model_dir)
    total = sum(response for _, response in lengths)
    sequences: list[TrainSequence] = []
    for prompt, response in lengths:
        tokens = rng.integers(2, VOCABULARY, prompt + response).astype(np.int32)
        if sequences and sequences[-1].num_prompt_tokens == prompt:
            tokens[:prompt] = sequences[-1].token_ids[:prompt]
        draft = TrainSequence(
            token_ids=tokens,
            num_prompt_tokens=prompt,
            rollout_logprobs=np.zeros(response, np.float32),
            advantage=float(rng.normal()),
            token_weight=1 / total,
            staleness=np.zeros(response, np.int32),
        )
        with torch.no_grad():
            own = plain_logprobs(model, draft).numpy()
        sequences.append(dataclasses.replace(draft, rollout_logprobs=own))
    return tuple(sequences)


def stale(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """The same tokens of an older policy, which the ranks do not compare with their own."""
    return tuple(dataclasses.replace(s, staleness=np.ones_like(s.staleness)) for s in sequences)


def train_batch(version: int, *minibatches: tuple[TrainSequence, ...]) -> TrainBatch:
    """One epoch, in order."""
    return TrainBatch(version=version, minibatches=minibatches, order=tuple(range(len(minibatches))))


def plain_gradients(model: Qwen2ForCausalLM, sequences: Sequence[TrainSequence]) -> dict[str, torch.Tensor]:
    """Of DAPO's objective, written out again, where the policy is the one that sampled: every ratio is 1."""
    loss = torch.zeros(())
    for sequence in sequences:
        logprobs = plain_logprobs(model, sequence)
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = loss - sequence.token_weight * sequence.advantage * ratio.sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of what is wanted, over all tensors."""
    assert found.keys() == wanted.keys()
    difference = math.fsum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return math.sqrt(difference / math.fsum(float(t.double().square().sum()) for t in wanted.values()))


class NeverWaits(TorchDispatchMode):
    """Refuses what would wait for a GPU: values that the host reads, and shapes that depend on values."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = WAITS & {*operator.tags}
        if operator is torch.ops.aten.index.Tensor:  # its shape depends on masks alone
            waits = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        assert not waits, f"{operator} waits for the device"
        return operator(*args, **kwargs or {})


def full_gradients(worker: Any, work: "RankWork") -> dict[str, torch.Tensor]:
    """Runs on a rank: the gradient that one optimizer step would use."""
    batches = [worker._updater._collate(sequences) for sequences in work.minibatches[0]]
    worker._updater._forward_backward(batches, None, None)
    trained = [(name, p) for name, p in worker._policy.model.named_parameters() if p.requires_grad]
    gradients = {name: p.grad.full_tensor() for name, p in trained}
    worker._optimizer.zero_grad()
    return gradients


def update_on(worker: Any, work: "RankWork") -> "Updated":
    """Runs on a rank: an update from whatever version the work is of."""
    worker._version.version = work.version
    return worker.update(work)


def update_here(worker: Any, batch: TrainBatch) -> "Updated":
    """An update of the one rank that this process is."""
    from dapo.workers.actor import split_batch

    return update_on(worker, split_batch(batch, 1, worker._cfg.actor.max_tokens_per_gpu)[0])


def update(pool: "ActorPool", batch: TrainBatch) -> dict[str, float]:
    """Metrics of an update from whatever version the batch is of."""

    def stand_at(worker: Any, version: int) -> None:
        worker._version.version = version

    on_all(pool, stand_at, [batch.version] * len(pool._ranks.workers))
    return asyncio.run(pool.update(batch)).metrics


def version_of(worker: Any) -> int:
    """Runs on a rank: the version that it takes its weights for."""
    return worker._version.version


def save(pool: "ActorPool", directory: Path) -> None:
    """A checkpoint of whatever version the ranks are at."""
    [version] = set(on_all(pool, version_of))
    asyncio.run(pool.save(str(directory), version))


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    """Runs on a rank."""
    from dapo.workers.training.fsdp import full_parameters

    return dict(full_parameters(worker._policy, worker._mesh))


def rank_checksum(worker: Any, policy: Any = None) -> str:
    """Runs on a rank: sha256 over names and bytes of all parameters of its policy, or of another one."""
    from dapo.workers.training.fsdp import full_parameters

    digest = hashlib.sha256()
    for name, tensor in full_parameters(policy or worker._policy, worker._mesh):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def checksum(pool: "ActorPool") -> str:
    """Returns the checksum of all parameters, equal on all ranks."""
    [found] = set(on_all(pool, rank_checksum))
    return found


_running: "dict[int, tuple[ActorPool, list[str]]]" = {}  # by number of ranks, with Ray's names of them
_sets = itertools.count()  # a part of the names, because Ray knows a rank that was killed for a while


def _end_all() -> None:
    for pool, _ in _running.values():
        pool.close()
    _running.clear()


end_with_the_group(_end_all)


def start_pool(cfg: Config) -> "ActorPool":
    """Ranks as `start` makes them of `cfg`, whatever was done to them before. The files of a group have one set of each
    size, which no test closes; one that breaks a rank takes `start_own_pool`."""
    from dapo.workers.actor import ActorPool

    count = cfg.actor.num_workers
    if count not in _running:
        number = next(_sets)
        names = [f"rank {k} of {count} in set {number}" for k in range(count)]
        _running[count] = _started(cfg, [RANK | {"name": name} for name in names]), names
        return _running[count][0]
    names = _running[count][1]
    pool = ActorPool(cfg, "cpu", lambda: [{"name": name, "get_if_exists": True} for name in names])
    on_all(pool, rebuild, [cfg] * count)
    return pool


def start_own_pool(cfg: Config) -> "ActorPool":
    """Ranks for one test, which closes them."""
    return _started(cfg, [RANK] * cfg.actor.num_workers)


RANK: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}


def _started(cfg: Config, options: Sequence[dict[str, Any]]) -> "ActorPool":
    from dapo.workers.actor import ActorPool

    pool = ActorPool(cfg, "cpu", lambda: options)
    asyncio.run(pool.start())
    return pool


@contextmanager
def rank_here(cfg: Config) -> Iterator[Any]:
    """One rank in this process, which `rebuild` makes anew."""
    from dapo.workers.actor import ActorWorker
    from dapo.workers.training import mesh

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    worker = ActorWorker(cfg, "cpu")
    worker.start(0, 1, "127.0.0.1", port)
    yield worker
    torch.distributed.destroy_process_group()
    if hasattr(mesh.arrange, "cache_clear"):
        mesh.arrange.cache_clear()


def rebuild(worker: Any, cfg: Config) -> None:
    """Runs on a rank: what `start` makes of `cfg` once the process group is there. Groups of the same shape are made
    once: each has threads that poll a hundred times a second, and none ever ends."""
    from dapo.workers.training import mesh

    if not hasattr(mesh.arrange, "cache_info"):
        mesh.arrange = functools.cache(mesh.arrange)
    worker._cfg = cfg
    worker._build()


def on_all(pool: "ActorPool", function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
    """function(worker, *args of the rank) on every rank."""
    from dapo.workers.remote import wait

    refs = [w.__ray_call__.remote(function, *own) for w, *own in zip(pool._ranks.workers, *args, strict=True)]
    return asyncio.run(wait(refs, 600, "a test", "none"))
