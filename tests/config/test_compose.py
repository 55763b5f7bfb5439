"""The command line: each mistake is one line with the name or value that was meant, before Hydra sees it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dapo.config import compose as module
from dapo.config.compose import checked_overrides, compose, to_config
from dapo.config.facts import vllm_source
from dapo.config.facts.vllm_source import engine_arguments
from dapo.config.names import experiments, hint
from dapo.config.plan import PlannedConfig
from dapo.config.schema import Config
from dapo.state.run_dir import HEADER, claim_output_dir
from tests.support.overrides import said

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["trainer.seed=7", "trainer.seed=8", "model.path='a b'"], id="values"),
        pytest.param(["data.train_files=[a,b]", "data.val_files={one: [a], two: [b]}"], id="lists and mappings"),
        pytest.param(["trainer={seed: 3, total_steps: 4}", "+trainer.seed=5"], id="a section"),
        pytest.param(["rollout.vllm.max_num_seqs=8", "rollout.vllm={enforce_eager: true}"], id="open keys"),
        pytest.param(["reward.functions=[{path: math, weight: 2}]", "model.dtype=bfloat16"], id="items"),
        pytest.param(
            ["trainer.output_dir=${oc.env:HOME}/${trainer.seed}", "trainer.total_steps=${trainer.seed}"],
            id="references",
        ),
        pytest.param(["rollout.vllm.x=1", "~rollout.vllm.x", "trainer.seed=3"], id="removed"),
    ],
)
def test_values_in_a_copy_of_an_experiment_make_the_tree_that_hydra_makes(arguments):
    asked = checked_overrides(["+experiment=dapo_tiny", *arguments])
    found, wanted = module._composed(asked), module._by_hydra(asked)
    assert found == wanted and OmegaConf.to_yaml(found) == OmegaConf.to_yaml(wanted)
    assert OmegaConf.is_struct(found) and OmegaConf.is_struct(wanted)


def test_a_copy_of_an_experiment_is_whole_whatever_was_done_to_the_one_before():
    first, again = (module._composed(["+experiment=dapo_tiny"]) for _ in range(2))
    first.trainer.seed += 1
    assert module._composed(["+experiment=dapo_tiny"]) == again == module._by_hydra(["+experiment=dapo_tiny"])


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        pytest.param("trainer.total_steps=abc", "`trainer.total_steps` (abc) must be a whole number", id="int"),
        pytest.param("trainer.total_steps=1.5", "`trainer.total_steps` (1.5) must be a whole number", id="fraction"),
        pytest.param("rollout.n=null", "`rollout.n` (null) must be a whole number", id="null"),
        pytest.param("actor.optim.lr=fast", "`actor.optim.lr` (fast) must be a number", id="float"),
        pytest.param("data.shuffle=maybe", "`data.shuffle` (maybe) must be true or false", id="bool"),
        pytest.param("model.dtype=[a]", "`model.dtype` (['a']) must be text", id="text"),
        pytest.param("data.train_files=x", "`data.train_files` (x) must be a list, such as [a, b]", id="list"),
        pytest.param("rollout.vllm=3", "`rollout.vllm` (3) must be a mapping, such as {a: 1}", id="mapping"),
        pytest.param("trainer=3", "`trainer` (3) must be a mapping", id="section"),
        pytest.param("trainer={seed: x}", "`trainer.seed` (x) must be a whole number", id="within a section"),
        pytest.param("reward.functions=[{weight: x}]", "`reward.functions[0].weight` (x) must be a n", id="item"),
        pytest.param(
            "reward.functions=[{path: math}, {path: format, weight: abc}]",
            "`reward.functions[1].weight` (abc) must be a number",
            id="second item",
        ),
        pytest.param(
            "reward.functions=[my_reward.py]",
            "`reward.functions[0]` (my_reward.py) must be a mapping, as in reward.functions=[{path: my_reward.py}]",
            id="item is no mapping",
        ),
        pytest.param(
            "data.sources=[a.parquet]",
            "`data.sources[0]` (a.parquet) must be a mapping, as in data.sources=[{name: mine, files: [mine.parquet]}]",
            id="source is no mapping",
        ),
        pytest.param(
            "reward={functions: [null]}",
            "`reward.functions[0]` (null) must be a mapping, as in",
            id="item in a section",
        ),
        pytest.param(
            "data.sources=[{name: a, functions: [{path: b}, {weight: c}]}]",
            "`data.sources[0].functions[1].weight` (c) must be a number",
            id="item of an item",
        ),
        pytest.param(
            "reward.functions=math", "`reward.functions` (math) must be a list, such as [{path: my_", id="list of items"
        ),
        pytest.param("reward.functions=[{3: 4}]", "unknown key `reward.functions[0].3`; did", id="key is a number"),
        pytest.param(
            "~trainer.seed", "`~trainer.seed` would remove a key that a run needs; leave it out", id="removed"
        ),
        pytest.param("~trainer.sede", "unknown key `trainer.sede`; did you mean `trainer.seed`?", id="removed typo"),
        pytest.param("~rollout.vllm.nothing", "'rollout.vllm.nothing' does not exist", id="removed argument"),
        pytest.param("rollout.n=1,2", "`rollout.n=1,2` gives several values; write a list as rollout.n=", id="sweep"),
        pytest.param("rollout.n", "`rollout.n` lacks a value; write KEY=VALUE", id="no value"),
        pytest.param("trainer.output_dir=~/a", "cannot read the override `trainer.output_dir=~/a`: ", id="home"),
        pytest.param("trainer.output_dir=~/a", "'~'; write the whole path, as in $HOME/...", id="home, remedy"),
        pytest.param("fast", "`fast` is no override; write KEY=VALUE", id="a word"),
        pytest.param("model={pat: x}", "unknown key `model.pat`; did you mean `model.path`?", id="key in a mapping"),
        pytest.param(
            "reward.functions=[{pth: math}]",
            "unknown key `reward.functions[0].pth`; did you mean `reward.functions[].path`?",
            id="key in a list",
        ),
        pytest.param("plan.hfu=0.4", "unknown key `plan.hfu`; it belongs to `python -m dapo.plan` alone", id="plan"),
    ],
)
def test_a_mistake_is_one_line(argument: str, problem: str) -> None:
    [line] = said(argument).splitlines()
    assert line.startswith(problem) or problem in line.removeprefix("Could not delete from config. ")


def test_a_run_takes_one_experiment() -> None:
    assert said("+experiment=dapo_tiny", "rollout.n=4", "+experiment=grpo_tiny") == (
        "`+experiment=dapo_tiny` and `+experiment=grpo_tiny`: a run takes one experiment; give one, and what you want "
        "of another as KEY=VALUE (their keys are in config/experiment)"
    )
    with pytest.raises(ValueError, match="a run takes one experiment"):
        compose(["+experiment=grpo_tiny"], "dapo_tiny")


def test_all_mistakes_come_at_once() -> None:
    lines = said(
        "trainer.total_steps=abc", "--rollout.n=4", "num_generations=8", "rollout.temperature=hot"
    ).splitlines()
    names = [line.split("`")[1] for line in lines]
    assert names == ["trainer.total_steps", "--rollout.n=4", "num_generations", "rollout.temperature"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], id="help"),
        pytest.param(["--cfg", "job", "--resolve"], id="flag with a value"),
        pytest.param(["-c", "job", "-p", "trainer"], id="short flags"),
        pytest.param(["--multirun", "trainer.seed=1,2"], id="sweep"),
        pytest.param(["--config-dir", "mine", "+experiment=own"], id="experiments of one's own"),
        pytest.param(["--config-d=mine", "hydra.run.dir=."], id="a flag's beginning"),
        pytest.param(["actor.optim.lr=${actor.optim.eps}"], id="interpolation"),
    ],
)
def test_what_is_right_goes_to_hydra_as_it_is(arguments: list[str]) -> None:
    assert checked_overrides(arguments) == arguments


@pytest.mark.parametrize(
    ("given", "for_hydra"),
    [
        ("+experiment=dapo_tiny --cfg job trainer.seed=7", "+experiment=dapo_tiny trainer.seed=7 --cfg job"),
        ("+experiment=dapo_tiny --help trainer.seed=7", "+experiment=dapo_tiny trainer.seed=7 --help"),
        ("--resolve trainer.seed=7 -c job rollout.n=4", "--resolve trainer.seed=7 rollout.n=4 -c job"),
        ("-m +experiment=dapo_tiny --info", "-m +experiment=dapo_tiny --info"),
    ],
)
def test_overrides_may_stand_after_flags(given: str, for_hydra: str) -> None:
    """Hydra's argparse takes them at one place alone."""
    assert checked_overrides(given.split()) == for_hydra.split()


def test_engine_arguments_are_added_and_removed() -> None:
    given = ["+experiment=dapo_tiny", "+rollout.n=4", "~rollout.vllm.max_num_seqs", "rollout.vllm.block_size=32"]
    checked = checked_overrides(given)
    assert checked == [*given[:1], "rollout.n=4", given[2], "++rollout.vllm.block_size=32"]
    assert compose([], "dapo_tiny").rollout.vllm["max_num_seqs"] == 256
    vllm = compose(given[1:], "dapo_tiny").rollout.vllm
    assert vllm["block_size"] == 32 and "max_num_seqs" not in vllm


@pytest.mark.parametrize("given", ["rollout.function.kwargs.attempts=3", "rollout.function.kwargs={attempts: 3}"])
def test_arguments_of_a_rollout_function_are_taken(given: str) -> None:
    assert compose(["rollout.function.path=retry", given], "dapo_tiny").rollout.function.kwargs == {"attempts": 3}


def test_scores_of_a_judges_words_are_taken_where_they_are_numbers() -> None:
    assert compose(["reward.judge.values={yes: 1, no: 0.0}"], "dapo_tiny").reward.judge.values == {"yes": 1, "no": 0}
    assert said("reward.judge.values.yes=much") == "`reward.judge.values.yes` (much) must be a number"


def test_an_unknown_engine_argument_is_found_without_vllm_and_before_a_worker() -> None:
    with pytest.raises(ValueError) as error:
        compose(["rollout.vllm.max_num_sequences=3", "rollout.vllm.xyzzy=1"], "dapo_tiny")
    assert str(error.value).splitlines() == [
        "`rollout.vllm.max_num_sequences` is no engine argument of the installed vLLM; did you mean `max_num_seqs`?",
        "`rollout.vllm.xyzzy` is no engine argument of the installed vLLM",
    ]


def test_engine_arguments_are_vllms_own() -> None:
    """Its dataclass fields, read out of the source."""
    vllm = pytest.importorskip("vllm")
    assert engine_arguments() == {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}


def forget_vllm() -> None:
    """Lets its source be read again."""
    for one in vars(vllm_source).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


def test_without_vllm_its_arguments_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_source.importlib.util, "find_spec", lambda name: None)
    forget_vllm()
    try:
        given = ["rollout.vllm.xyzzy=1", "rollout.vllm.enforce_eager=maybe"]
        assert compose(given, "dapo_tiny").rollout.vllm == {"max_num_seqs": 256, "xyzzy": 1, "enforce_eager": "maybe"}
        assert hint("max_num_seqs") == "config/README.md lists all keys"
    finally:
        forget_vllm()


def test_the_planners_assumptions_are_no_part_of_a_run(tmp_path: Path) -> None:
    cfg = compose([], "dapo_tiny")
    assert type(cfg) is Config and "plan" not in dataclasses.asdict(cfg)
    planned = compose(["plan.hfu=0.4"], "dapo_tiny", plan=True)
    assert isinstance(planned, PlannedConfig) and planned.plan.hfu == 0.4
    assert planned.plan.gpu_memory_bytes == 16e9, "the experiment's own"


def test_a_run_recorded_with_the_planners_section_goes_on(tmp_path: Path) -> None:
    recorded = dataclasses.asdict(compose(["plan.hfu=0.4"], "dapo_tiny", plan=True))
    claim_output_dir(str(tmp_path), "auto", recorded).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with claim_output_dir(str(tmp_path), "auto", dataclasses.asdict(compose([], "dapo_tiny"))) as run:
        run.begin()
    now = (tmp_path / "config.yaml").read_text()
    assert now.startswith(HEADER) and "\nplan:" not in now


def test_the_reference_of_all_keys_is_current() -> None:
    done = subprocess.run([sys.executable, "-m", "dapo.config"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    written = (ROOT / "config" / "README.md").read_text()
    assert done.stdout == written, "run `python -m dapo.config > config/README.md`"
    assert all(f"| `{name}` |" in written for name in experiments())
    assert "| `rollout.n` | `16` | responses per prompt | at least 2" in written


def test_help_says_how_to_begin_and_where_the_keys_are() -> None:
    command = [sys.executable, "-m", "dapo.main_ppo", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and len(done.stdout.splitlines()) < 15
    for words in ("+experiment=NAME [KEY=VALUE ...]", "dapo_tiny", "config/README.md", "--cfg job"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "shown", "told"),
    [
        pytest.param(["+experiment=dapo_tiny"], "path: pkg://dapo.tiny/base\n", "", id="whole"),
        pytest.param(
            ["+experiment=dapo_tiny", "rollout.n=1"], "  'n': 1\n", "refuse it: `rollout.n` (1) must", id="refused"
        ),
        pytest.param([], "  - ???\n", "refuse it: no value for `data.train_files[0]`", id="missing"),
        pytest.param(["--config-dir", "/tmp"], "  - ???\n", "", id="files of a person's own"),
    ],
)
def test_a_configuration_that_is_printed_is_checked_too(arguments: list[str], shown: str, told: str) -> None:
    """It is printed all the same: whoever asks for it may look for what is wrong."""
    command = [sys.executable, "-m", "dapo.main_ppo", *arguments, "--cfg", "job"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert (told in done.stderr) if told else done.stderr == ""


def test_a_configuration_is_printed_with_the_overrides_behind_the_flag() -> None:
    command = [sys.executable, "-m", "dapo.main_ppo", "+experiment=dapo_tiny", "--cfg", "job", "trainer.seed=77"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "  seed: 77\n" in done.stdout


def test_the_checks_load_neither_torch_nor_transformers_nor_ray() -> None:
    program = (
        "import sys, dapo.config.compose as c; c.compose(['rollout.vllm.max_num_seqs=3'], 'dapo_tiny'); "
        "print(sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


def test_a_value_that_is_missing_is_named() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(ValueError, match=r"no value for `data.train_files\[0\]`, `model.path`; give one"):
        to_config(OmegaConf.structured(PlannedConfig))


@pytest.mark.parametrize(
    ("given", "colocate", "offload"), [("true", "memory", "host"), ("false", "none", "none"), ("memory", "memory", "")]
)
def test_what_were_switches_once_still_read_as_such(given: str, colocate: str, offload: str) -> None:
    line = [f"trainer.colocate={given}", f"actor.offload={given}"][: 2 if offload else 1]
    cfg = compose(line, "dapo_qwen0.5b_1gpu")
    assert (cfg.trainer.colocate, cfg.actor.offload) == (colocate, offload or "none")
