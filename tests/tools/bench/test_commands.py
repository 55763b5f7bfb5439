"""Every command of the benchmarks at its smallest size, as a person would type it."""

import asyncio
import pkgutil
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.driver.fleet import build_pools
from dapo.pools import Pools
from dapo.tools import bench
from dapo.tools.bench import setting
from dapo.tools.bench.__main__ import main, parse
from dapo.tools.bench.sync import to_config
from dapo.workers.placing.asked import pools
from tests.support.runs import Runs

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


def test_the_readme_names_commands_that_exist() -> None:
    text = (Path(bench.__file__).parent / "README.md").read_text()
    found = [words.split() for words in re.findall(r"dapo[. ]bench ([a-z][^`#\n]*)", text)]
    assert len({words[0] for words in found}) >= 6
    for words in found:
        parse(words)


def test_overrides_are_of_the_experiment_that_they_name() -> None:
    paths = [
        setting.bench_config(*named, "rollout.n=4").trainer.output_dir for named in ([], ["+experiment=grpo_tiny"])
    ]
    assert [Path(path).name for path in paths] == ["dapo_tiny-n_4", "grpo_tiny-n_4"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["step", "short", "0"], "'0' is no whole number of at least 1"),
        (["sync", "rollout.n=4"], "this command takes no overrides (rollout.n=4)"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "short", "1", "rollout.m=4"], r"unknown key `rollout.m`; did you mean `rollout.n`\?$"),
    ],
)
def test_what_cannot_be_measured_is_one_message(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=f"^dapo.bench: {said}"):
        main(words)


@pytest.mark.parametrize(
    ("module", "words"), [("cycle", "cycle"), ("host", "host"), ("sync", "sync --ranks 1 --colocate --transports ipc")]
)
def test_what_is_measured_on_one_gpu_asks_for_one(module: str, words: str) -> None:
    given = parse([*words.split(), "--device", "cuda"])
    to_config = pkgutil.resolve_name(f"dapo.bench.{module}:to_config")
    cfg = to_config(given, str(resolve_path("pkg://dapo.tiny/base")))
    assert sum(pool.all_gpus for pool in pools(cfg, "cuda")) == 1


def test_options_of_sync_become_a_configuration_that_the_checks_accept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = parse(["sync", "--ranks", "2", "--engines", "2", "--colocate", "--bucket-mib", "3"])
    cfg = to_config(options, str(tmp_path))
    assert (cfg.actor.num_workers, cfg.rollout.num_engines, cfg.weight_sync.bucket_bytes) == (2, 2, 3 << 20)
    with pytest.raises(ValueError, match="`rollout.num_engines`"):
        to_config(parse(["sync", "--ranks", "2", "--colocate", "--device", "cuda"]), str(tmp_path))


def test_driver(capsys: pytest.CaptureFixture[str]) -> None:
    """The driver keeps all slots of both fleets full, and is idle most of the time."""
    main("driver --engines 2 4 --slots 16 --n 4 --tokens 50 --tokens-per-s 10 --seconds 20 --buckets 2".split())
    [rows] = tables(capsys.readouterr().out)
    assert [row["engines"] for row in rows] == ["2", "4"]
    for row in rows:
        engines, responses = int(row["engines"]), float(row["responses/s"])
        assert responses == pytest.approx(16 * engines / 5, rel=0.5)
        assert float(row["groups/s"]) * 4 == pytest.approx(responses, abs=0.3)
        assert float(row["pulses/s"]) == 2 * engines
        assert 0 < float(row["CPU s per s"]) < 1 and float(row["engines of one core"]) > engines


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
@pytest.mark.nightly
def test_step(shared_engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["step", "short", "1", *FEW])
    [[row]] = tables(capsys.readouterr().out)
    seconds = {name: float(row[f"{name} s"]) for name in ("step", "engine alone", "bare update", "update")}
    assert 0 < seconds["bare update"] < seconds["step"] and 0 < seconds["engine alone"]
    floors = seconds["engine alone"] + seconds["bare update"] + 0.2
    assert float(row["ratio"]) == pytest.approx(seconds["step"] / floors, rel=0.02 / floors)  # what rounding hides
    assert 0 < float(row["goodput"]) <= 1


@pytest.mark.ray
@pytest.mark.nightly
def test_sync(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape 1m --ranks 1 --colocate --turns 1 --syncs 1 --transports broadcast ipc"
    main(["sync", *words.split()])
    text = capsys.readouterr().out
    assert "1M parameters, 4 MB in float32, 256 MiB buckets" in text
    [rows] = tables(text)
    assert [row["transport"] for row in rows] == ["broadcast", "ipc"]
    assert all(float(row["median s"]) > 0 for row in rows)


@pytest.mark.ray
@pytest.mark.nightly
def test_cycle(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --models pkg://dapo.tiny/base --cycles 2 --tokens 128 --bucket-mib 1"
    main(["cycle", *words.split()])
    [[row]] = tables(capsys.readouterr().out)
    phases = ("sleep s", "update s", "wake weights s", "transfer s", "wake KV s")
    assert float(row["cycle s"]) == pytest.approx(sum(float(row[phase]) for phase in phases), abs=0.1)
    assert float(row["update s"]) > 0 and float(row["transfer s"]) > 0
    assert 0 < float(row["largest difference"]) <= 1e-4


@pytest.mark.ray
@pytest.mark.nightly
def test_host(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["host", *"--device cpu --models pkg://dapo.tiny/base --requests 2 8 --tokens 32 --rounds 1".split()])
    [rows] = tables(capsys.readouterr().out)
    assert [row["requests"] for row in rows] == ["2", "8"]
    for row in rows:
        tokens, seconds = int(row["tokens"]), float(row["s"])
        assert int(row["requests"]) <= tokens <= 32 * int(row["requests"])
        assert float(row["us per token"]) == pytest.approx(1e6 * seconds / tokens, abs=5000 / tokens)
        assert float(row["us of the actor"]) > 0 and float(row["us of the engine"]) > 0
