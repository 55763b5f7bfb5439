"""Packs the sequences of one optimizer step into micro-batches without padding. A micro-batch is a set of whole
sequences laid end to end (`workers.training.forward.policy`). Pure Python, so that the driver packs without torch."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import fsum

# For a model of unknown shape. A decoder layer of hidden size h spends about 24 h^2 FLOPs per token in its matrices and
# 2 h L in causal attention (L / 2 keys on average), so attention costs as much as the rest at L = 12 h: 49,152 tokens
# at h = 4096, between a 7B model (3584) and a 32B model (5120).
ATTENTION_EQUALS_REST_TOKENS = 49_152
MAX_IMBALANCE = 0.05  # of the heaviest rank over the mean, where the lengths allow it
SHARED_FROM = 0.1  # part of the tokens that must be saved for a prompt to be computed once for several responses


def estimated_work(length: int, equal_at: int = ATTENTION_EQUALS_REST_TOKENS) -> float:
    """Estimates the FLOPs of one sequence of `length` tokens, in units of a token's FLOPs outside attention. equal_at:
    length at which linear and quadratic part cost the same (`ModelShape.attention_equals_rest_tokens`)."""
    return length + length * length / equal_at


def worth_sharing(prompt: int, lengths: Sequence[int]) -> bool:
    """Whether to compute the common `prompt` tokens of a micro-batch once. lengths: of the sequences, with prompt."""
    return (len(lengths) - 1) * prompt >= SHARED_FROM * sum(lengths)


def pack(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    equal_at: int = ATTENTION_EQUALS_REST_TOKENS,
    prompts: Sequence[tuple[bytes, int]] = (),
) -> list[list[list[int]]]:
    """Distributes sequences over ranks, or groups of ranks that share micro-batches, and over micro-batches.

    lengths: tokens of each sequence, prompt included. equal_at: see `estimated_work`. prompts: the prompt of each
    sequence and its number of tokens. Neighbours with the same prompt share it in a micro-batch: they are put together,
    2, 4, 8 ... at a time, if that reduces the work.
    Returns [num_ranks][num_micro_batches][sequence indices]: each index exactly once, each micro-batch at most
    `max_tokens` tokens, the same number of micro-batches on every rank (FSDP hangs otherwise; missing ones are empty
    lists), at least one and as few as the heuristics find. Ranks have similar total work, and so have the micro-batches
    of one position where possible. The result is deterministic on every Python version: `fsum` is used because `sum`
    rounds differently from 3.12 on, and could choose differently between equal candidates.
    Raises ValueError if a sequence is longer than `max_tokens`.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if lengths and lengths[longest] > max_tokens:
        raise ValueError(
            f"`actor.max_tokens_per_gpu` x `actor.ulysses_sequence_parallel_size` ({max_tokens}) is smaller than a "
            f"training sequence: sequence {longest} has {lengths[longest]} tokens (prompt and response); raise one to "
            "hold `data.max_prompt_length` + `data.max_response_length`, or lower these"
        )
    work = [estimated_work(length, equal_at) for length in lengths]
    best, least = _pack(lengths, work, num_ranks, max_tokens)
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=lambda i: prompts[i][0])]
    together = 2
    while together <= max(map(len, runs), default=0):
        items = [item for run in runs for item in _share(run, together, lengths, prompts[run[0]][1], max_tokens)]
        saved = [(len(item) - 1) * estimated_work(prompts[item[0]][1], equal_at) for item in items]
        packed, needed = _pack(
            [sum(lengths[i] for i in item) for item in items],
            [fsum(work[i] for i in item) - less for item, less in zip(items, saved, strict=True)],
            num_ranks,
            max_tokens,
        )
        if needed < least:
            best = [[[i for k in members for i in items[k]] for members in rank] for rank in packed]
            least = needed
        together *= 2
    return best


def _share(
    run: Sequence[int], together: int, lengths: Sequence[int], prompt: int, max_tokens: int
) -> Iterator[Sequence[int]]:
    """Splits sequences with the same prompt into runs of `together` that fit; single ones if not worth sharing."""
    for start in range(0, len(run), together):
        part = run[start : start + together]
        of_part = [lengths[i] for i in part]
        if sum(of_part) <= max_tokens and worth_sharing(prompt, of_part):
            yield part
        else:
            yield from ([i] for i in part)


def _pack(
    lengths: Sequence[int], work: Sequence[float], num_ranks: int, max_tokens: int
) -> tuple[list[list[list[int]]], float]:
    """Returns [num_ranks][num_micro_batches][indices], and the work of the heaviest rank at each position, summed."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_micro_batches = max(1, -(-sum(lengths) // (max_tokens * num_ranks)))
    while True:
        dealt = _fill_lightest(lengths, work, order, num_ranks, num_micro_batches * max_tokens)
        bins = _fill_lightest(lengths, work, order, num_ranks * num_micro_batches, max_tokens)
        bins = bins or _fill_first(lengths, order, num_ranks * num_micro_batches, max_tokens)
        found = [
            _split_ranks(lengths, work, dealt, num_micro_batches, max_tokens) if dealt else None,
            _deal(work, bins, num_ranks) if bins else None,
        ]
        ranks = min((one for one in found if one), key=lambda one: _cost(work, one), default=None)
        if ranks is not None:
            return [[sorted(indices) for indices in rank] for rank in ranks], _cost(work, ranks)[1]
        num_micro_batches += 1


def _cost(work: Sequence[float], ranks: list[list[list[int]]]) -> tuple[bool, float]:
    """Returns a sort key of candidates: first whether the ranks' work differs by more than `MAX_IMBALANCE`. Then the
    work of the heaviest rank at each position, summed, as FSDP's collectives keep all ranks at the same micro-batch."""
    loads = [[fsum(work[i] for i in indices) for indices in rank] for rank in ranks]
    totals = [fsum(rank) for rank in loads]
    uneven = max(totals) * len(ranks) > (1 + MAX_IMBALANCE) * fsum(totals)
    return uneven, fsum(map(max, zip(*loads, strict=True)))


def _split_ranks(
    lengths: Sequence[int], work: Sequence[float], dealt: list[list[int]], num_micro_batches: int, max_tokens: int
) -> list[list[list[int]]] | None:
    """Assigns each rank's sequences, heaviest first, to its micro-batches. None if one does not fit. All ranks follow
    one profile: if one has a sequence larger than its share of a micro-batch, the others make that micro-batch as heavy
    and the rest lighter, instead of waiting for it with equal ones."""
    rest = max(fsum(work[i] for i in members) for members in dealt)
    profile: list[float] = []
    for position in range(num_micro_batches):
        longest = max((work[members[position]] for members in dealt if len(members) > position), default=0.0)
        profile.append(max(longest, rest / (num_micro_batches - position)))
        rest = max(0.0, rest - profile[-1])
    ranks = []
    for members in dealt:
        bins: list[list[int]] = [[] for _ in profile]
        missing, room = list(profile), [max_tokens] * num_micro_batches
        for i in members:
            fitting = [b for b in range(num_micro_batches) if lengths[i] <= room[b]]
            if not fitting:
                return None
            b = max(fitting, key=missing.__getitem__)
            bins[b].append(i)
            missing[b] -= work[i]
            room[b] -= lengths[i]
        ranks.append(bins)
    return ranks


def _fill_lightest(
    lengths: Sequence[int], work: Sequence[float], order: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Balanced: longest first, into the bin with the least work that has room. None if one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for i in order:
        full = []
        while heap and tokens[heap[0][1]] + lengths[i] > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b = heap[0]
        bins[b].append(i)
        tokens[b] += lengths[i]
        heapq.heapreplace(heap, (load + work[i], b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fill_first(lengths: Sequence[int], order: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Dense: longest first, into the first bin with room, for nearly full bins. None if one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    for i in order:
        b = next((b for b in range(num_bins) if lengths[i] <= room[b]), None)
        if b is None:
            return None
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _deal(work: Sequence[float], bins: list[list[int]], num_ranks: int) -> list[list[list[int]]]:
    """Makes bins of similar work one micro-batch position; there the heaviest bin goes to the lightest rank."""
    weights = [fsum(work[i] for i in members) for members in bins]
    heaviest_first = sorted(range(len(bins)), key=lambda b: (-weights[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for start in range(0, len(bins), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda r: (load[r], r))
        for rank, b in zip(lightest_first, heaviest_first[start : start + num_ranks], strict=True):
            ranks[rank].append(bins[b])
            load[rank] += weights[b]
    return ranks
