"""Packs the sequences of one optimizer step into micro-batches: lengths in, indices per rank and micro-batch out.

No padding token is computed: a micro-batch is a set of whole sequences laid end to end (`workers.policy`). Pure
Python, so the driver packs without torch. DESIGN section 7.
"""

import heapq
from collections.abc import Sequence

# Work of a sequence of L tokens, in units of one token outside attention. A decoder layer of hidden size h spends
# about 24 h^2 FLOPs per token in its matrices and 2 h L in causal attention (L / 2 keys on average), so attention
# costs as much as the rest at L = 12 h: 49,152 tokens at h = 4096, between a 7B model (3584) and a 32B model (5120).
ATTENTION_EQUALS_REST_TOKENS = 49_152


def estimated_work(length: int) -> float:
    """Cost of one sequence of `length` tokens: linear part plus quadratic part, in tokens. Unit: one short token."""
    return length + length * length / ATTENTION_EQUALS_REST_TOKENS


def pack(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Spread sequences over ranks and micro-batches.

    lengths: tokens of each sequence, prompt included. Returns [num_ranks][num_micro_batches][sequence indices]: each
    index exactly once, each micro-batch at most `max_tokens` tokens, the same number of micro-batches on every rank
    (FSDP hangs otherwise; missing ones are empty lists), at least one and as few as two packing heuristics find. The
    micro-batches of one position do similar work on all ranks, and so does each rank in total. The same input gives
    the same output.

    Raises ValueError if a sequence is longer than `max_tokens`.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if lengths and lengths[longest] > max_tokens:
        raise ValueError(
            f"`actor.max_tokens_per_gpu` ({max_tokens}) is smaller than a training sequence: sequence {longest} has "
            f"{lengths[longest]} tokens (prompt and response); raise it to at least `data.max_prompt_length` + "
            "`data.max_response_length`, or lower these"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_micro_batches = max(1, -(-sum(lengths) // (max_tokens * num_ranks)))
    while True:
        num_bins = num_ranks * num_micro_batches
        bins = _fill_lightest(lengths, order, num_bins, max_tokens) or _fill_first(lengths, order, num_bins, max_tokens)
        if bins is not None:
            return _deal(lengths, bins, num_ranks)
        num_micro_batches += 1


def _fill_lightest(
    lengths: Sequence[int], order: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Longest sequence first into the bin with the least work that has room: balanced. None if one found no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for i in order:
        full = []
        while heap and tokens[heap[0][1]] + lengths[i] > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        work, b = heap[0]
        bins[b].append(i)
        tokens[b] += lengths[i]
        heapq.heapreplace(heap, (work + estimated_work(lengths[i]), b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fill_first(lengths: Sequence[int], order: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """First fit, longest first: denser than `_fill_lightest` where bins are nearly full. None if one found no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    for i in order:
        b = next((b for b in range(num_bins) if lengths[i] <= room[b]), None)
        if b is None:
            return None
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _deal(lengths: Sequence[int], bins: list[list[int]], num_ranks: int) -> list[list[list[int]]]:
    """Bins of similar work become one micro-batch position; in each position the heaviest goes to the lightest rank."""
    work = [sum(estimated_work(lengths[i]) for i in members) for members in bins]
    heaviest_first = sorted(range(len(bins)), key=lambda b: (-work[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for start in range(0, len(bins), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda r: (load[r], r))
        for rank, b in zip(lightest_first, heaviest_first[start : start + num_ranks], strict=True):
            ranks[rank].append(sorted(bins[b]))
            load[rank] += work[b]
    return ranks
