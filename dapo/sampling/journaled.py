"""Decides which groups go into the journal and which of them count when a run goes on from a checkpoint.

In: groups as the buffer keeps them; the state of the checkpoint. Out: the groups that finished after the checkpoint and
that a run from there may train on as if it had generated them: those whose tokens are all of its policy or older.
"""

import hashlib
from collections.abc import Callable

from dapo.sampling.draws import BufferState
from dapo.sampling.saved import decode_group, encode_group
from dapo.state.journal import Journal
from dapo.types import Draw, Group, Prompt

PROMPT_BYTES = 8  # of a record, before the group: a digest of the prompt, which stands in no record


def note(journal: Journal, group: Group, started: int) -> None:
    """Appends a group that the buffer keeps, with the policy version at its start.

    A group with tokens of a later policy than the last checkpoint's is of no use: a run that goes on from there makes
    another such policy, and the next checkpoint holds the group, or it is trained on by then.
    """
    if max(started, newest_policy(group)) <= journal.version:
        size = sum(each.token_ids.nbytes + each.rollout_logprobs.nbytes + len(each.text) for each in group.responses)
        journal.append(lambda: _prompt_digest(group.draw.prompt) + encode_group(group, started), size)


def recover(
    journal: Journal,
    state: BufferState,
    held: int,
    draw: Callable[[int], Draw],
    *,
    version: int,
    void: Callable[[Group], bool] = lambda group: False,
) -> list[tuple[Group, int]]:
    """Returns the groups that finished after the checkpoint of policy `version`, in draw order, each with the version
    at its start, and begins the journal anew with them.

    state, held: of the checkpoint, and how many groups it holds. draw: the stream's, by index. void: whether a group
    must not be trained on.
    """
    found: dict[int, tuple[Group, int, bytes]] = {}
    for record in journal.read(version):
        try:
            group, started = decode_group(record[PROMPT_BYTES:], draw)
        except ValueError:
            continue
        index = group.draw.index
        same_prompt = _prompt_digest(group.draw.prompt) == record[:PROMPT_BYTES]
        fits = same_prompt and state.awaits(index, held) and max(started, newest_policy(group)) <= version
        if fits and not void(group):
            found[index] = group, started, record  # the last one, where a draw came back
    in_order = [found[index] for index in sorted(found)]
    journal.restart(version, [record for _, _, record in in_order])
    return [(group, started) for group, started, _ in in_order]


def newest_policy(group: Group) -> int:
    """Returns the latest policy version that sampled a token of the group; -1 where it has none."""
    return max((span.version for response in group.responses for span in response.policy_versions), default=-1)


def _prompt_digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=PROMPT_BYTES).digest()
