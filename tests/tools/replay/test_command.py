"""What a replay needs, said before anything starts; how its outcome reads; batches on disk."""

import asyncio
import json
import math
import os
import signal
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dapo.config.compose import checked_overrides, compose, half_flags
from dapo.config.schema import Config, LoggingConfig
from dapo.data.order import PromptOrder
from dapo.driver.run import _halve
from dapo.ground.clock import PhaseClock
from dapo.ground.signals import caught
from dapo.report.store.samples import SampleStore
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state.batches import Batches, SavedStream, steps_kept, stream_of
from dapo.state.run_dir import CONFIG, HEADER, METRICS, STARTED, claim_output_dir
from dapo.tools.replay.__main__ import main
from dapo.tools.replay.again import prepare
from dapo.tools.replay.outcome import Outcome, words
from dapo.types import Group
from tests.support.fakes import make_group, make_prompt, make_response
from tests.support.store.stored import collected_of

TINY = "dapo_tiny"


def put(batches: Batches, step: int, groups: list[Group]) -> None:
    async def written() -> None:
        await batches.put(step, groups)
        await batches.written()

    asyncio.run(written())


def kept(folder: Path, *steps: int, keep: int | None = None) -> Path:
    """A directory of batches: in step k, draws 2k and 2k + 1."""
    batches = Batches(folder, keep)
    for step in steps:
        put(batches, step, [make_group(2 * step + k, [1.0, 0.0]) for k in range(2)])
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run of three steps of which no checkpoint is left, and the batch of the second is gone."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG).write_text(HEADER + OmegaConf.to_yaml(OmegaConf.create(asdict(compose([], TINY)))))
    (folder / STARTED).write_text("2026-01-02T03:04:05\n")
    kept(folder / "batches", 1, 3)
    return folder


@pytest.mark.parametrize(
    ("words_given", "said"),
    [
        (["NOWHERE", "--step", "1"], r"NOWHERE holds no config.yaml; give the `trainer.output_dir` of a run"),
        (["RUN", "--step", "0"], r"`--step` \(0\) must be at least 1"),
        (
            ["RUN", "--step", "3"],
            r"no batch of steps 2, which step 3 needs after the first model; it has 1, 3; `checkp",
        ),
        (["RUN", "--step", "1", "--out", "RUN"], r"`--out` \(.*run\) is not empty; give a new directory"),
        (["RUN", "--step", "1", "algorithm.clip_ratio_hihg=1"], r"did you mean `algorithm.clip_ratio_high`\?"),
        (["RUN", "--step", "1", "algorithm.clip_ratio_high=-1"], r"`algorithm.clip_ratio_high` \(-1.0\) must be"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(run: Path, words_given: list[str], said: str) -> None:
    arguments = [word.replace("RUN", str(run)) for word in words_given]
    with pytest.raises(SystemExit, match=f"^dapo.replay: .*{said}"):
        main(arguments)


def test_a_step_is_taken_again_under_the_settings_that_it_was_taken_with(run: Path) -> None:
    """The run went on with another learning rate, and its config.yaml has that one."""
    kept(run / "batches", 1, 2, 3)
    config = asdict(compose([], TINY))
    for step, rate in ((1, 1e-3), (2, 2e-3)):
        config["actor"]["optim"]["lr"] = rate
        store = SampleStore(run, LoggingConfig(), warn=pytest.fail)
        store.begin(config)
        store.step(step, collected_of([make_group(step, [1.0, 0.0])]))
        store.close()
    now = OmegaConf.load(run / CONFIG).actor.optim.lr
    assert [prepare(run, step, None, []).cfg.actor.optim.lr for step in (1, 2, 3)] == [1e-3, 2e-3, now]
    assert prepare(run, 1, None, ["actor.optim.lr=3e-3"]).cfg.actor.optim.lr == 3e-3


def test_the_newest_batches_stay_and_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "step_000003.tmp").touch()  # of a start that was killed
    assert steps_kept(kept(tmp_path, 1, 2, 3, keep=2)) == [2, 3]
    assert steps_kept(kept(tmp_path / "none", 1, 2, keep=0)) == []
    groups = {index: make_group(index, [1.0, 0.0]) for index in range(10)}
    buffer = OversamplingBuffer(train_batch_size=2, max_in_flight=8)
    stream = SavedStream(tmp_path, buffer, lambda index: groups[index].draw)
    buffer.serving(2)
    collected = asyncio.run(stream.collect())
    assert [group.draw.index for group in collected.groups] == [6, 7] and collected.drawn == collected.groups
    for found in collected.groups:
        whole = groups[found.draw.index]
        assert found.scores == whole.scores
        for one, other in zip(found.responses, whole.responses, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.rollout_logprobs.tolist() == other.rollout_logprobs.tolist()
    buffer.serving(3)
    with pytest.raises(ValueError, match=r"has no batch of step 4; it has \[2, 3\]"):
        asyncio.run(stream.collect())


def test_groups_that_were_read_are_counted_by_their_accuracies(tmp_path: Path) -> None:
    """Where nothing is filtered, as in GRPO, a batch holds groups of every kind."""
    groups = [make_group(index, given) for index, given in enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]))]
    put(Batches(tmp_path / "batches", None), 1, groups)
    cfg = compose([f"--train-only={tmp_path / 'batches'}", "filter_groups.enable=false"], TINY)
    order = PromptOrder([group.draw.prompt for group in groups], seed=0, shuffle=False)
    stream = stream_of(cfg, order, OversamplingBuffer.of(cfg), None, PhaseClock())
    collected = asyncio.run(stream.collect())
    assert Counter(collected.outcomes) == {"mixed": 1, "all_correct": 1, "all_wrong": 2}


@pytest.mark.parametrize("mode", ["none", "truncate"])
@pytest.mark.parametrize(
    ("ages", "last", "oldest"), [((0, 1, 2), 3, 2), ((0, 1, 2), 1, 0), ((0, 1, 0), 3, 1), ((0,), 9, 0)]
)
def test_tokens_of_older_policies_are_not_trained_on_without_a_correction(
    tmp_path: Path, ages, last, oldest, mode
) -> None:
    batches = Batches(tmp_path / "batches", None)
    for step, age in enumerate(ages, 1):
        group = make_group(step, [1.0, 0.0])
        responses = make_response(4, version=step - 1), make_response(4, version=step - 1 - age)
        put(batches, step, [replace(group, responses=responses)])
    flags = [f"--train-only={tmp_path / 'batches'}", f"algorithm.rollout_correction.mode={mode}"]
    cfg = compose([*flags, f"trainer.total_steps={last}"], TINY)
    if oldest and mode == "none":
        with pytest.raises(
            ValueError, match=rf"`data.batches` \(.*are {oldest} updates old.*\(none\).*truncate or mask"
        ):
            _halve(cfg, None)
    else:
        assert _halve(cfg, None) == min(last, len(ages))


@pytest.mark.parametrize("other", ["seed", "shuffle", "prompts"])
def test_answers_to_other_prompts_are_refused(tmp_path: Path, other: str) -> None:
    prompts = [make_prompt(number) for number in range(40)]
    order = PromptOrder(prompts, seed=0, shuffle=True)
    groups = [replace(make_group(index, [0.0, 1.0]), draw=order.draw(index)) for index in range(4)]
    put(Batches(tmp_path, None), 1, groups)

    def read(found: PromptOrder) -> list[int]:
        buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12)
        collected = asyncio.run(SavedStream(tmp_path, buffer, found.draw).collect())
        return [group.draw.prompt.id for group in collected.groups]

    own = [order.draw(index).prompt.id for index in range(4)]
    assert read(PromptOrder(prompts, seed=0, shuffle=True)) == own
    of_another_day = [replace(prompt, token_ids=prompt.token_ids + 1, text="today") for prompt in prompts]
    assert read(PromptOrder(of_another_day, seed=0, shuffle=True)) == own
    changed = [make_prompt(number + 100) for number in range(40)] if other == "prompts" else prompts
    stranger = PromptOrder(changed, seed=int(other == "seed"), shuffle=other != "shuffle")
    with pytest.raises(ValueError) as error:
        read(stranger)
    for part in ("`data.batches`", str(tmp_path / "step_000001"), "`data.train_files`", "`trainer.seed`"):
        assert part in str(error.value)


def test_a_run_that_went_back_keeps_what_it_writes_and_nothing_of_the_course_that_it_left(tmp_path: Path) -> None:
    kept(tmp_path, *range(1, 31), keep=20)
    assert steps_kept(tmp_path) == [*range(11, 31)]
    kept(tmp_path, 6, 7, 8, 9, keep=20)
    assert steps_kept(tmp_path) == [6, 7, 8, 9]
    kept(tmp_path, 8, keep=None)
    assert steps_kept(tmp_path) == [6, 7, 8]


def test_a_batch_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no directory")
    kept(tmp_path / "file", 1, keep=20)
    assert "the batch of step 1 was not kept for `dapo.replay`" in capsys.readouterr().err
    group = make_group(0, [1.0, 0.0])
    group = replace(group, responses=tuple(replace(each, text="\ud800") for each in group.responses))
    put(Batches(tmp_path / "batches", 20), 1, [group])
    assert "the batch of step 1 was not kept for `dapo.replay`: UnicodeEncodeError" in capsys.readouterr().err


def test_a_run_that_only_generates_ends_before_a_step_whose_batch_cannot_be_written(tmp_path: Path) -> None:
    """Its batches are all that it makes, and a later start must generate this one again."""
    (tmp_path / "file").write_text("no directory")
    batches = Batches(tmp_path / "file", None)
    with pytest.raises(RuntimeError, match=r"the batch of step 1 cannot be written to .*file .*the same command"):
        asyncio.run(batches.put(1, [make_group(0, [1.0, 0.0])]))


def test_an_outcome_tells_what_differs() -> None:
    metrics = {"actor/loss": (0.5, 0.25), "actor/lr": (1.0, 1.0), "batch/x": (math.nan, math.nan)}
    found = Outcome(metrics=metrics, weights={"a": 0.0, "b": 0.125})
    assert not found.same and found.differing == {"actor/loss": (0.5, 0.25)}
    text = words(found, 7)
    assert "differs" in text.splitlines()[1]
    assert text.endswith(
        "step 7 again: 2 of 3 metrics of the update are equal to the bit; 1 of 2 parameters differ, by 0.125 at most"
    )
    same = Outcome(metrics={"actor/lr": (1.0, 1.0)}, weights={"a": 0.0})
    assert same.same and words(same, 7).endswith("equal to the bit, and all 1 parameters")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--train-only"], r"`trainer.only` is train, and `data.batches` \(empty\) .*give both, as --train-only="),
        (["data.batches=x"], r"`trainer.only` is both, and `data.batches` \(x\) is for train"),
        (["--train-only=NONE"], r"`data.batches` \(NONE\) holds no batch; give the folder batches/ of a run"),
        (["--rollout-only", "rollout.vllm.load_format=dummy"], r"\(dummy\) gives engines random weights"),
        (["trainer.only=half"], r"`trainer.only` \(half\) must be one of both, rollout, train"),
    ],
)
def test_half_a_run_without_the_other_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compose(overrides, TINY)


def test_a_whole_run_is_not_continued_as_half_of_one(run: Path) -> None:
    """Its checkpoints would lack the actors from then on."""
    (run / METRICS).write_text('{"step": 1}\n')
    half = asdict(compose(["--rollout-only", f"trainer.output_dir={run}"], TINY))
    with pytest.raises(ValueError, match=r"`trainer.only` is 'both' there and 'rollout' here"):
        claim_output_dir(str(run), "auto", half)


def test_flags_are_keys(run: Path) -> None:
    flags = ["--rollout-only", f"--train-only={run / 'batches'}", "trainer.seed=3"]
    keys = ["trainer.only=rollout", "trainer.only=train", f"data.batches={run / 'batches'}", "trainer.seed=3"]
    assert half_flags(flags) == checked_overrides(flags) == keys
    assert compose(flags[1:], TINY).trainer.only == "train"


@pytest.mark.parametrize("taken_over", [False, True], ids=["signal", "another process takes the directory"])
def test_a_replay_that_is_stopped_ends_its_training_and_says_so(
    run: Path, taken_over: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[int] = []

    async def train(cfg: Config, *rest: object, until: int, **options: object) -> None:
        if taken_over:
            other = {"token": "another", "pid": "7", "host": "elsewhere", "since": "yesterday"}
            (Path(cfg.trainer.output_dir) / ".lease").write_text(json.dumps(other))
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            stopped.append(until)
            raise

    monkeypatch.setattr("dapo.state.lease.BEAT_S", 0.1)
    monkeypatch.setattr("dapo.driver.run.train", train)
    before = {each: signal.signal(each, lambda *_: None) for each in caught()}
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(run), "--step", "1"])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert stopped == [1]
    if taken_over:
        assert "was taken over by process 7 on elsewhere" in " ".join(str(ended.value).split())
    else:
        assert ended.value.code == 130 and "interrupted; nothing was compared" in capsys.readouterr().err
