"""Largest size of a run's output directory, one term per folder or file."""

from dapo.config.plan import PlannedConfig
from dapo.plan.step import mean_tokens
from dapo.plan.terms import Term, size

# Names in the output directory.
CHECKPOINTS, STORE, BATCHES, JOURNAL = "checkpoints", "samples.sqlite", "batches", "journal"
TEXT_BYTES = 4  # per token, about, for English with formulas
ARRAY_BYTES = 8  # per token: its id and its log-probability
ROW_BYTES = 300  # per response in the store, besides its text


def checkpoints_kept(cfg: PlannedConfig) -> int:
    """Checkpoints on disk at the end: the last one, and earlier ones that are not deleted."""
    every = 1 if cfg.checkpoint.every_s else cfg.checkpoint.every
    saved = 1 + (cfg.trainer.total_steps // every if every else 0)
    return min(cfg.checkpoint.keep or saved, saved)


def on_disk(cfg: PlannedConfig, checkpoint_bytes: float) -> tuple[Term, ...]:
    """Terms named as in the output directory. checkpoint_bytes: of one checkpoint."""
    steps, only, response = cfg.trainer.total_steps, cfg.trainer.only, mean_tokens(cfg)[1]
    trained = cfg.data.train_batch_size * cfg.rollout.n
    drawn = trained / (cfg.plan.mixed_rate if cfg.filter_groups.enable and only != "train" else 1.0)
    kept = checkpoints_kept(cfg) + 1
    group_bytes = (ARRAY_BYTES + TEXT_BYTES) * response
    batches = {"rollout": steps, "train": 0}.get(only, min(cfg.checkpoint.batches, steps))
    segments = min(kept, steps) if cfg.checkpoint.journal and only != "train" else 0
    return (
        Term(
            name=CHECKPOINTS,
            amount=kept * checkpoint_bytes,
            formula=f"{kept:,} of {size(checkpoint_bytes)}, one of them being written",
        ),
        _store(cfg, drawn),
        Term(
            name=BATCHES,
            amount=batches * trained * group_bytes,
            formula=f"{batches:,} steps x {trained:,} responses x {response:,} tokens x {ARRAY_BYTES + TEXT_BYTES} B",
        ),
        Term(
            name=JOURNAL,
            amount=segments * drawn * group_bytes,
            formula=f"{segments:,} segments x {drawn:,.0f} responses x {response:,} tokens x "
            f"{ARRAY_BYTES + TEXT_BYTES} B",
        ),
    )


def _store(cfg: PlannedConfig, drawn: float) -> Term:
    """The sample store: texts up to its limit, all other data, and a second copy of a step while it is written."""
    log, steps = cfg.logging, cfg.trainer.total_steps
    text = min(TEXT_BYTES * mean_tokens(cfg)[1], log.max_text_bytes) * log.sample_fraction
    step = drawn * (ROW_BYTES + text)
    whole, bound = steps * step, max(log.max_store_bytes, steps * drawn * ROW_BYTES) + 2 * step
    formula = f"{steps:,} steps x {drawn:,.0f} responses x ({ROW_BYTES} + {text:,.0f}) B"
    if log.max_store_bytes and bound < whole:
        return Term(name=STORE, amount=bound, formula=f"logging.max_store_bytes and two steps, of {formula}")
    return Term(name=STORE, amount=whole, formula=formula)
