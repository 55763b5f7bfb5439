"""`dapo scale RUN --advice`, from the record of a simulated run."""

import functools
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest

from dapo.algorithm.fate import TRAINED, Fate
from dapo.config.compose import compose
from dapo.state.fleet_size import wanted_engines
from dapo.state.lease import LEASE
from dapo.state.run_dir import CONFIG
from dapo.tools.scale import main
from dapo.tools.simulate.advice import model_of
from dapo.tools.simulate.fleet import Workload
from dapo.tools.simulate.strategies import Scenario, Simulation, later, streaming
from dapo.types import Group
from tests.support.fakes import make_group, make_response
from tests.support.store.stored import collected_of, store_in

TOKEN_S = 0.02
TRUTH = Scenario(
    workload=Workload(rate=0.8, n=4, median=40, sigma=0.4, cap=300),
    engines=2,
    slots=32,
    batch=24,
    steps=51,
    update=60.0,
    sync=10.0,
    in_flight=200,
    crowding=0.6,
)
KEYS = (
    *("rollout.n=4", "rollout.vllm.max_num_seqs=32", "data.train_batch_size=24", "data.gen_batch_size=200"),
    "algorithm.rollout_correction.mode=truncate",
)
CONFIGURED = "rollout: {{min_engines: {least}}}\ntrainer: {{colocate: none, only: both}}\n"


@functools.cache
def taken(scenario: Scenario, staleness: int) -> Simulation:
    return streaming(scenario, max_staleness=staleness)


def write_record(folder: Path, staleness: int = 0, steps: int = 51, without: str = "") -> None:
    """The files of a run that took what `TRUTH` takes."""
    run = taken(TRUTH, staleness)
    seconds = defaultdict(list)  # of a response, by its tokens
    for tokens, taken_s in run.ended:
        seconds[tokens].append(taken_s * TOKEN_S)

    def group(draw: int) -> Group:
        attempt = run.attempts[draw]
        responses = [
            replace(make_response(length), seconds=fmean(seconds[length] or [0.0])) for length in attempt.lengths
        ]
        return replace(make_group(draw, [float(each) for each in attempt.right]), responses=tuple(responses))

    store, first = store_in(folder), 0
    store.begin(asdict(compose([*KEYS, f"filter_groups.max_staleness={staleness}"], experiment="dapo_tiny")))
    for step, trained in enumerate(run.trained[:steps], start=1):
        groups = [group(draw) for draw in range(first, trained[-1] + 1)]
        first = trained[-1] + 1
        fates = tuple(TRAINED if each.draw.index in trained else Fate.ALL_WRONG for each in groups)
        store.step(step, replace(collected_of(groups), fates=fates))
        values = {
            "perf/step_s": run.steps[step - 1] * TOKEN_S,
            "perf/update_s": TRUTH.update * TOKEN_S,
            "perf/sync_s": TRUTH.sync * TOKEN_S,
            "perf/driver_s": 0.0,
            "perf/engine/running_mean": 50.0,
            "perf/engine/tokens_per_s": 3000.0,
            "perf/engine/kv_use_mean": 0.01,
            **{f"perf/engine/{engine}/tokens_per_s": 1500.0 for engine in range(TRUTH.engines)},
        }
        store.metrics(step, {name: value for name, value in values.items() if name != without})
    store.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_paper_takes_what_the_run_takes_also_with_other_engines(tmp_path: Path, staleness: int) -> None:
    write_record(tmp_path, staleness)
    model = model_of(tmp_path)
    assert model.scenario.engines == 2 and model.scenario.slots == 32
    for engines in (1, 2, 4):
        truth = later(taken(replace(TRUTH, engines=engines), staleness).steps) * TOKEN_S
        assert later(model.run(engines).steps) * model.token_s == pytest.approx(truth, rel=0.05)


def advised(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """Rows of the table, by number of engines."""
    main([*words, "--advice"])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines[4:]}


def test_the_numbers_of_least_cost_and_least_seconds_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path)
    rows = advised(capsys, str(tmp_path), "--among", "1", "4", "9")
    assert [row[-1] for row in rows.values()] == ["least cost", "", "least seconds"]
    prices = ("--price-per-engine-hour", "1", "--price-per-rank-hour", "3", "--lost", "0.3", "--back-s", "2")
    money = advised(capsys, str(tmp_path), "--among", "1", "2", *prices)
    assert [row[-1] for row in money.values()] == ["", "least cost, least seconds"]
    assert float(money["1"][0]) > 1.1 * float(rows["1"][0])
    step_s, groups, cost = (float(cell.replace(",", "")) for cell in rows["4"][:3])
    assert groups == pytest.approx(24 * 3600 / step_s, rel=0.01)
    assert cost == pytest.approx(1000 * 4 / groups, rel=0.01)


def test_a_run_follows_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes steps while the command sleeps."""
    run, looks = tmp_path / "run", [0, 4, 20, 25, 51]
    for steps in looks:
        folder = tmp_path / str(steps)
        folder.mkdir()
        if steps:
            write_record(folder, steps=steps)
        (folder / CONFIG).write_text(CONFIGURED.format(least=1))
        (folder / LEASE).touch()
    run.symlink_to("0")
    left = iter(looks[1:])

    def go_on(seconds: float) -> None:
        if steps := next(left, None):
            run.unlink()
            run.symlink_to(str(steps))
        else:
            (run / LEASE).unlink()

    monkeypatch.setattr(time, "sleep", go_on)
    main([str(run), "--follow", "seconds", "--among", "1", "4"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 20: 2 engines take") and "4 are wanted" in first and second.startswith("step 51: ")
    assert [wanted_engines(tmp_path / str(steps)) for steps in looks] == [None, None, 4, None, 4]

    with pytest.raises(SystemExit, match="no run goes on"):
        main([str(run), "--follow", "cost", "--among", "1"])
    (run / LEASE).touch()
    main(
        [
            str(run),
            "--follow",
            "cost",
            "--among",
            "1",
            "2",
            "--price-per-engine-hour",
            "1",
            "--price-per-rank-hour",
            "3",
        ]
    )
    assert "wanted" not in capsys.readouterr().out, "the run has the best number already"
    assert wanted_engines(run) == 4
    (run / CONFIG).write_text(CONFIGURED.format(least=2))
    with pytest.raises(SystemExit, match="--among 1 is less"):
        main([str(run), "--follow", "cost", "--among", "4", "1"])


@pytest.mark.parametrize(
    ("steps", "without", "words", "message"),
    [
        pytest.param(0, "", ["--advice"], "has no perf/step_s", id="new"),
        pytest.param(5, "", ["--advice"], "has 4 steps with its present number of engines", id="young"),
        pytest.param(9, "perf/update_s", ["--advice"], "has no perf/update_s", id="no update"),
        pytest.param(0, "", ["--advice", "engines=3"], "one of engines=N, --advice and --follow", id="both"),
        pytest.param(0, "", [], "one of engines=N, --advice and --follow", id="neither"),
        pytest.param(0, "", ["--follow", "cost"], "--follow needs --among", id="any number"),
        pytest.param(0, "", ["--follow", "cost", "--among", "2"], "not the directory of a run", id="no run"),
        pytest.param(0, "", ["--advice", "--lost", "1"], "must be between 0 and 0.9", id="all lost"),
        pytest.param(0, "", ["--advice", "--price-per-rank-hour", "1"], "--price-per-engine-hour", id="one price"),
    ],
)
def test_what_gives_no_advice_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, without: str, words: list[str], message: str
) -> None:
    write_record(tmp_path, steps=steps, without=without)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *words])
    assert message in f"{ended.value}{capsys.readouterr().err}"
