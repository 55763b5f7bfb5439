"""What the tests of saving ask of a run: its saves, its tokens, a full disk."""


def tokens(actors) -> list[list[tuple]]:
    """What each update trained on."""
    return [
        [(sequence.token_ids.tolist(), sequence.advantage) for minibatch in batch.minibatches for sequence in minibatch]
        for batch in actors.batches
    ]


def seen(trainer) -> list[str]:
    return trainer._pools.rollouts.seen


FULL = OSError(28, "No space left on device")
