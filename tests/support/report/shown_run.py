"""Makes run directories for what shows a run: a real store with groups, metrics, evaluations and events, by formula."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dapo.algorithm.fate import TRAINED
from dapo.config.compose import compose
from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.types import Group
from tests.support.fakes import make_group, make_response, make_score
from tests.support.store.stored import collected_of


def metrics_of(step: int, steps: int, drawn: int) -> dict[str, float]:
    """A run that learns, with falling entropy, rising truncation and drifting parity."""
    done = step / steps
    wave = 0.04 * math.sin(step)
    generation, update = 60 + 80 * done + 10 * math.sin(step / 3), 40 - 10 * done
    return {
        "rollout/accuracy": 0.2 + 0.6 * done + wave,
        "rollout/reward_mean": -0.6 + 1.2 * done + wave,
        "reward/math": -0.5 + 1.2 * done,
        "reward/format": 0.9 - 0.2 * done,
        "rollout/response_length_mean": 900 + 3000 * done + 50 * math.sin(step),
        "rollout/truncated": 0.02 + 0.2 * done,
        "buffer/drawn": float(drawn),
        "buffer/trained": drawn / 3,
        "buffer/all_correct": drawn / 2 * done,
        "buffer/all_wrong": drawn / 3 * (1 - done),
        "actor/entropy": 0.8 * math.exp(-2 * done),
        "actor/approx_kl": 0.001 * done,
        "actor/ratio_mean": 1.0 + 0.001 * wave,
        "actor/skipped_steps": 0.0,
        "parity/mean_abs_logprob_diff": 0.003 + 0.03 * done,
        "batch/staleness_mean": 0.4 + wave,
        "perf/generation_s": generation,
        "perf/engine/idle": (update + 4.3) / (generation + update + 4.3),
        "perf/reward_s": 20.0,
        "perf/update_s": update,
        "perf/sync_s": 4.0,
        "perf/driver_s": 0.3,
        "perf/step_s": generation + update + 4.3,
    }


def make_run(
    directory: Path,
    steps: int,
    *,
    text: Callable[[int, int], str],
    drawn: int = 3,
    n: int = 16,
    sets: Sequence[str] = ("",),
    **logging: object,
) -> Path:
    """A run of so many steps. text(draw, sample): of the answers. sets: names of the held-out ones.

    Of three groups one is mixed, one all wrong, one mixed with an answer that is truncated and one without a verdict.
    """
    directory.mkdir(exist_ok=True)
    store = SampleStore(directory, LoggingConfig(**logging), warn=pytest.fail)
    store.begin(asdict(compose(["+experiment=dapo_tiny", "trainer.output_dir=/tmp/run"])))
    store.resume(0)
    add_steps(store, range(1, steps + 1), steps, text, drawn=drawn, n=n, sets=sets)
    store.event("warning", "engine 1 is lost")
    store.close()
    return directory


def add_steps(
    store: SampleStore,
    numbers: Iterable[int],
    steps: int,
    text: Callable[[int, int], str],
    *,
    drawn: int = 3,
    n: int = 16,
    sets: Sequence[str] = ("",),
) -> None:
    """Steps of a run of `steps`."""
    for step in numbers:
        groups = [_group((step - 1) * drawn + number, n, text) for number in range(drawn)]
        fates = tuple("all_wrong" if group.draw.index % 3 == 1 else TRAINED for group in groups)
        trained = tuple(group for group, fate in zip(groups, fates, strict=True) if fate == TRAINED)
        store.step(step, replace(collected_of(groups), groups=trained, fates=fates))
        store.metrics(step, metrics_of(step, steps, drawn))
        if step % 20 == 0:
            accuracy = 0.2 + 0.4 * step / steps
            ends = {"": accuracy, "_low": accuracy - 0.05, "_high": 0.7}
            values = {f"eval/{name}accuracy{end}": value for name in sets for end, value in ends.items()}
            store.metrics(step, {"eval/accuracy": accuracy} | values)
            store.event("save", f"step {step}")
        store.flush()


def _group(draw: int, n: int, text: Callable[[int, int], str]) -> Group:
    kind = draw % 3
    accuracies = [0.0 if kind == 1 else float((sample + draw) % 3 == 0) for sample in range(n)]
    responses = [make_response(20 + (draw * 7 + at * 13) % 100, "stop", text(draw, at)) for at in range(n)]
    if kind == 2:
        accuracies[-1] = math.nan
        responses[0] = replace(responses[0], finish_reason="length")
    scores = [
        replace(make_score(each), parts={"math": 2 * each - 1, "format": float(at % 2)}, prediction="42")
        for at, each in enumerate(accuracies)
    ]
    return replace(make_group(draw, accuracies), responses=tuple(responses), scores=tuple(scores))
