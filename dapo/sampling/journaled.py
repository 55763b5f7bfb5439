"""Decides which groups go into the journal, and which of them a resumed run uses. These are the groups that finished
after the checkpoint and whose tokens are all of its policy or older ones: the resumed run could have generated them
itself."""

import hashlib
from collections.abc import Callable

from dapo.sampling.draws import BufferState
from dapo.sampling.saved import decode_group, encode_group
from dapo.state.journal import Journal
from dapo.types import Draw, Group, Prompt

PROMPT_BYTES = 8  # digest of the prompt before the group in a record; prompts are not stored


def note(journal: Journal, group: Group, started: int) -> None:
    """Appends a buffered group, with the policy version at its start. A group with tokens of a policy after the last
    checkpoint is skipped: a run resumed from there makes another such policy, and the next checkpoint has the group, or
    it is trained on by then."""
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
    at its start. Restarts the journal with them. state: of the checkpoint. held: number of its groups. draw: of an
    index. void: whether a group must not be trained on."""
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
            found[index] = group, started, record  # the last one, if a draw was started again
    in_order = [found[index] for index in sorted(found)]
    journal.restart(version, [record for _, _, record in in_order])
    return [(group, started) for group, started, _ in in_order]


def newest_policy(group: Group) -> int:
    """Returns the latest policy version that sampled a token of the group; -1 without tokens."""
    return max((span.version for response in group.responses for span in response.policy_versions), default=-1)


def _prompt_digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=PROMPT_BYTES).digest()
