"""Every command of the benchmarks at its smallest size, as a person would type it."""

import asyncio
import pkgutil
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dapo import bench
from dapo.bench import setting
from dapo.bench.__main__ import main, parse
from dapo.bench.steps.overlap import LEND, OVERLAP
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.derived import lends
from dapo.fleet import build_pools
from dapo.pools import Pools
from tests.support.runs import Runs
from workers.placing.asked import pools

COMMANDS = (
    "step",
    "overlap",
    "lend",
    "save",
    "driver",
    "store",
    "rewards",
    "code",
    "update",
    "logprobs",
    "device",
    "cycle",
    "host",
    "decode",
    "sync",
)
ONE_RANK = "actor.num_workers=1"  # a process starts in six seconds of a core
FEW = ("data.train_batch_size=2", "data.gen_batch_size=4", "actor.ppo_mini_batch_size=2")


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each Markdown table in `text`: a dictionary per row."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append(line.strip("| ").split(" | "))
        elif found[-1] and not line.startswith("|--"):
            found.append([])
    return [[dict(zip(names, row, strict=True)) for row in rows] for names, *rows in filter(None, found)]


def test_help_starts_nothing() -> None:
    program = f"""
import contextlib, io, sys
from dapo import bench
from dapo.bench.__main__ import main
for words in ([], *([name] for name in {COMMANDS}), ["both"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    assert out.getvalue().startswith("usage: python -m dapo.bench"), words
print(*sorted({{"torch", "ray", "vllm", "transformers", "hydra", "numpy"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_the_readme_names_commands_that_exist() -> None:
    text = (Path(bench.__file__).parent / "README.md").read_text()
    found = [words.split() for words in re.findall(r"python -m dapo\.bench ([a-z][^`#\n]*)", text)]
    assert {words[0] for words in found} == {*COMMANDS, "both"}
    for words in found:
        parse(words)


def test_the_old_spelling_of_step() -> None:
    for words in (["both", "10"], ["short"], ["long", "3", "rollout.n=4"], ["rollout.n=4", "both"]):
        assert vars(parse(words)) == vars(parse(["step", *words]))
    assert vars(parse(["step"])) == vars(parse(["both", "10"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["logprobs", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["step", "short", "0"], "'0' is no whole number of at least 1"),
        (["sync", "rollout.n=4"], "this command takes no overrides (rollout.n=4)"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_override_is_one_message() -> None:
    with pytest.raises(SystemExit, match=r"^dapo.bench: unknown key `rollout.m`; did you mean `rollout.n`\?$"):
        main(["step", "short", "1", "rollout.m=4"])


@pytest.mark.parametrize(("settings", "seqs"), [(OVERLAP, 32), (LEND, 8)], ids=["overlap", "lend"])
def test_the_settings_of_a_comparison_are_accepted(tmp_path: Path, settings: tuple[str, ...], seqs: int) -> None:
    cfg = setting.run_config("short", tmp_path, [*settings, *FEW])
    assert cfg.rollout.vllm == {"max_num_seqs": seqs} and lends(cfg) == (settings is LEND)


@pytest.mark.parametrize(
    ("module", "words"), [("cycle", "cycle"), ("host", "host"), ("sync", "sync --ranks 1 --colocate --transports ipc")]
)
def test_what_is_measured_on_one_gpu_asks_for_one(module: str, words: str) -> None:
    given = parse([*words.split(), "--device", "cuda"])
    to_config = pkgutil.resolve_name(f"dapo.bench.engines.{module}:to_config")
    cfg = to_config(given, str(resolve_path("pkg://dapo.tiny/base")))
    assert sum(pool.all_gpus for pool in pools(cfg, "cuda")) == 1


def test_driver(capsys: pytest.CaptureFixture[str]) -> None:
    main(["driver", "8", "20"])
    head = capsys.readouterr().out
    [[row]] = tables(head)
    assert head.splitlines()[0].endswith(" draws of 16 responses of 20 tokens, 8 groups trained on")
    stages = [float(row[name]) for name in ("buffer s", "advantages and batch s", "metrics s")]
    assert float(row["together s"]) == pytest.approx(sum(stages), abs=0.02)


def test_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["store", "32", "20", "--steps", "2", "--folder", str(tmp_path)])
    head = capsys.readouterr().out
    assert head.startswith(f"32 responses of 20 tokens a step, under {tmp_path}\n")
    [rows] = tables(head)
    assert [row["step"] for row in rows] == ["1", "2"] and not list(tmp_path.iterdir())
    assert all(float(row["files MiB"]) > 0 and float(row["on disk after s"]) >= 0 for row in rows)


@pytest.fixture
def shared_engines(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a benchmark in this process use the engines of the runs in it, which live in one event loop."""

    @asynccontextmanager
    async def on_shared(cfg: Config) -> AsyncIterator[Pools]:
        async with build_pools(cfg, await runs.engines(cfg)) as pools:
            yield pools

    monkeypatch.setattr(setting, "build_pools", on_shared)
    monkeypatch.setattr(asyncio, "run", runs.run)


@pytest.mark.ray
def test_step(shared_engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["step", "short", "1", *FEW])
    [[row]] = tables(capsys.readouterr().out)
    seconds = {name: float(row[f"{name} s"]) for name in ("step", "engine alone", "bare update", "update")}
    assert 0 < seconds["bare update"] < seconds["step"] and 0 < seconds["engine alone"]
    floors = seconds["engine alone"] + seconds["bare update"] + 0.2
    assert float(row["ratio"]) == pytest.approx(seconds["step"] / floors, rel=0.02 / floors)  # what rounding hides
    assert 0 < float(row["goodput"]) <= 1


@pytest.mark.ray
def test_overlap(shared_engines: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dapo.bench.steps.overlap.WARM_UP", 0)
    main(["overlap", "short", "1", "1", ONE_RANK, *FEW])
    text = capsys.readouterr().out
    [[row]] = tables(text)
    strict, loose = (float(row[f"groups/s, staleness {staleness}"]) for staleness in (0, 1))
    half = 0.005  # what is printed is rounded, and a busy machine trains few groups per second
    ratio = float(row["ratio (each round)"].split()[0])
    assert (loose - half) / (strict + half) - half <= ratio <= (loose + half) / max(strict - half, 1e-3) + half
    shown = [line for line in text.splitlines() if line.startswith("staleness ")]
    assert [line.split(":")[0] for line in shown] == ["staleness 0", "staleness 1"]
    assert "batch/staleness_mean 0.000" in shown[0]


@pytest.mark.ray
@pytest.mark.long
def test_lend(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lend", "short", "1", "1", ONE_RANK, *FEW])
    text = capsys.readouterr().out
    [[row]] = tables(text)
    assert float(row["groups/s, not lending"]) > 0 and float(row["groups/s, lending"]) > 0
    without, lent = [line for line in text.splitlines() if "lending: " in line]
    assert without.startswith("not lending: ") and "perf/lending/" not in without
    assert float(lent.split("perf/lending/sleep_s ")[1].split()[0]) > 0, "it was tried"


@pytest.mark.ray
def test_save(shared_engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    from dapo.bench.steps.save import KINDS

    main(["save", "1", ONE_RANK, *FEW])
    [rows] = tables(capsys.readouterr().out)
    assert [row["kind of step"] for row in rows] == list(KINDS)
    assert all(float(row["step s"]) > 0 for row in rows)
    for row in rows[2:]:
        more, save = float(row["more than without s"].split()[0]), float(row["save s"])
        assert save > 0 and float(row["delay / save"].rstrip("%")) == pytest.approx(100 * more / save, abs=2)
    assert [row["save s"] for row in rows[:2]] == ["–", "–"]


@pytest.mark.ray
def test_decode(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="n-gram drafts need it; bash launch/install.sh")
    main(["decode", "--requests", "1", "4", "--rounds", "2", "--ngram", "1"])
    [rows] = tables(capsys.readouterr().out)
    assert [row["requests"] for row in rows] == ["1", "4"]
    for row in rows:
        ratio = float(row["tokens/s with"]) / float(row["tokens/s without"])
        assert float(row["ratio"]) == pytest.approx(ratio, abs=0.02) and float(row["s with"]) > 0
        assert 0 < float(row["accepted"]) < 1 < float(row["per draft"]) < 5


@pytest.mark.ray
def test_sync(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape 1m --ranks 1 --colocate --turns 1 --syncs 1 --transports broadcast ipc"
    main(["sync", *words.split()])
    text = capsys.readouterr().out
    assert "1M parameters, 4 MB in float32, 256 MiB buckets" in text
    [rows] = tables(text)
    assert [row["transport"] for row in rows] == ["broadcast", "ipc"]
    assert all(float(row["median s"]) > 0 for row in rows)


@pytest.mark.ray
def test_cycle(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --models pkg://dapo.tiny/base --cycles 2 --tokens 128 --bucket-mib 1"
    main(["cycle", *words.split()])
    [[row]] = tables(capsys.readouterr().out)
    phases = ("sleep s", "update s", "wake weights s", "transfer s", "wake KV s")
    assert float(row["cycle s"]) == pytest.approx(sum(float(row[phase]) for phase in phases), abs=0.1)
    assert float(row["update s"]) > 0 and float(row["transfer s"]) > 0
    assert 0 < float(row["largest difference"]) <= 1e-4


@pytest.mark.ray
def test_host(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["host", *"--device cpu --models pkg://dapo.tiny/base --requests 2 8 --tokens 32 --rounds 1".split()])
    [rows] = tables(capsys.readouterr().out)
    assert [row["requests"] for row in rows] == ["2", "8"]
    for row in rows:
        tokens, seconds = int(row["tokens"]), float(row["s"])
        assert int(row["requests"]) <= tokens <= 32 * int(row["requests"])
        assert float(row["us per token"]) == pytest.approx(1e6 * seconds / tokens, abs=5000 / tokens)
        assert float(row["us of the actor"]) > 0 and float(row["us of the engine"]) > 0


@pytest.mark.ray
def test_update(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["update", "--shapes", "short", "--repeats", "2", ONE_RANK, "rollout.n=2"])
    text = capsys.readouterr().out
    [[row]] = tables(text)
    assert row["shape"] == "short" and float(row["within ranks / loop"]) > 0
    assert float(row["within ranks"]) > 0 and float(row["update tokens/s with Ray"]) > 0
    assert "wanted: at least 0.85" in text
