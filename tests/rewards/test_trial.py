"""What is told of reward functions before any worker starts: one run with many functions, one fork server."""

import json
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.rewards.trial import tried

# name: body, what is said, in order: a line, warnings (they begin with `reward.functions[i]`), or an error (!).
FUNCTIONS: dict[str, tuple[str, list[str]]] = {
    "good": (
        "return 1.0 if solution_str == 'Answer: ' + ground_truth else -1.0",
        ["right answer 1.0, wrong -1.0, empty -1.0 (3 rows; right is 'Answer: 26')"],
    ),
    "text": ("return '1.0'", ["!right answer 'Answer: 26': TypeError: reward function", "gave str as its score"]),
    "list": ("return [1.0]", ["!right answer 'Answer: 26': TypeError: reward function", "gave [1.0] as its score"]),
    "raises": (
        "return solution_str.missing",
        ["!compute_score` raised AttributeError", "at line 2 of raises.py; correct it"],
    ),
    "hangs": ("import time; time.sleep(99)", ["!it needs more than `reward.limits.wall_s` (1 s)"]),
    "ends": ("import os; os._exit(3)", ["!its process ended (crash, exit status 3)"]),
    "denied": ("return float(open('/x' * 9, 'w').write('x'))", ["!FileNotFoundError"]),
    "nothing": (
        "pass",
        ["right answer None, wrong None, empty None", "gave None for the right, wrong, empty answer"],
    ),
    "forgot": (
        "return 1.0 if solution_str.endswith(ground_truth) else None",
        ["right answer 1.0, wrong None, empty None", "gave None for the wrong, empty answer"],
    ),
    "brittle": (
        "return {'score': 1 / len(solution_str)}",
        ["right answer 0.1, wrong 0.1, empty no score", "no score for the empty answer: reward function"],
    ),
    "marked": (
        "return float('#### ' + ground_truth in solution_str)",
        [
            "right answer 1.0, wrong 0.0, empty 0.0 (3 rows; right is '#### 26')",
            "looks for '#### 26', and none of the first 100 prompts of `data.train_files` asks for that form; ask the "
            "model for it: 'data.system_prompt=\"Think step by step. Then write #### and the final number.\"'",
        ],
    ),
    "alone": (
        "return float(solution_str == ground_truth)",
        ["right answer 1.0, wrong 0.0, empty 0.0 (3 rows; right is '26')", "no answer with words around it, such as"],
    ),
    "waits": ("async", ["not tried: it is async and may ask a server"]),
}
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "


@pytest.fixture
def given(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    asked = "" if "asked" in request.fixturenames else " Write Answer: NUMBER"
    rows = [{"prompt": f"{number}+0=?{asked}", "answer": str(number)} for number in range(26, 140)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        "reward.limits.wall_s=1",
        "reward.limits.cpu_s=0.5",
    ]


def written(folder: Path, name: str, body: str) -> str:
    head = f"async {HEAD}return 1.0" if body == "async" else HEAD + body
    (folder / f"{name}.py").write_text(head + "\n")
    return f"{{path: {folder / f'{name}.py'}}}"


def test_every_function_is_tried_on_a_right_a_wrong_and_an_empty_answer(tmp_path: Path, given: list[str]) -> None:
    functions = [written(tmp_path, name, body) for name, (body, _) in FUNCTIONS.items()]
    lines, warnings, errors = tried(compose([*given, f"reward.functions=[{', '.join(functions)}]"], "dapo_tiny"))
    for index, (name, (_, said)) in enumerate(FUNCTIONS.items()):
        about = [line for line in lines if line.startswith(f"reward {name}.py: ")]
        about += [line for line in warnings if line.startswith(f"`reward.functions[{index}]` (")]
        failed = [line for line in errors if line.startswith(f"`reward.functions[{index}]` (")]
        if said[0].startswith("!"):
            assert not about and len(failed) == 1
            assert all(words.removeprefix("!") in failed[0] for words in said), failed
        else:
            assert not failed and len(about) == len(said), about
            assert all(words in line for words, line in zip(said, about, strict=True)), about


ASKS = 'ask the model for it: `system_prompt: "Think step by step. Then write #### and the final number."` in its entry'
SOURCE = (
    "data.train_files=[]",
    "data.sources=[{{name: own, files: [{file}], system_prompt: '{asked}', functions: [{own}]}}]",
)


@pytest.mark.parametrize(
    ("asked", "own", "said", "warned"),
    [
        pytest.param("Solve it.", "{path: gsm8k}", ["right answer 1.0, wrong -1.0"], [ASKS], id="unasked"),
        pytest.param("End with ####.", "{path: gsm8k}", ["right answer 1.0, wrong -1.0"], [], id="asked"),
        pytest.param("Put it in a \\boxed{}.", "{path: math}", ["right answer 1.0"], [], id="boxed"),
        pytest.param("", "{path: code}", ["not tried: its rows hold no reference solution"], [], id="code"),
        pytest.param(
            "Think in <think>, write Answer:",
            "{path: format}",
            ["right answer 1.0, wrong 1.0, empty 0.0"],
            ["gives the same score for right and wrong answers"],
            id="no verifier",
        ),
        pytest.param(
            "Write Answer:",
            "return 0.1 + (solution_str.endswith(ground_truth))",
            ["right answer 1.1, wrong 0.1, empty 0.1"],
            ["gives wrong answers a positive score, which counts as right"],
            id="a bonus that makes all right",
        ),
    ],
)
def test_what_the_functions_of_a_source_give_together(
    tmp_path: Path, given: list[str], asked: str, own: str, said: list[str], warned: list[str]
) -> None:
    if not own.startswith("{"):
        own = written(tmp_path, "mine", own)
    source = SOURCE[1].format(file=tmp_path / "rows.jsonl", asked=asked, own=own)
    lines, warnings, errors = tried(compose([*given[1:], SOURCE[0], source], "dapo_tiny"))
    assert len(lines) == len(said) and all(words in line for words, line in zip(said, lines, strict=True)), lines
    assert len(warnings) == len(warned), warnings
    assert all(words in line for words, line in zip(warned, warnings, strict=True)), warnings
    assert not errors


def test_the_function_in_the_readme_can_train_the_quickstart(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    _, head, rest = readme.partition("def compute_score(")
    (tmp_path / "my_reward.py").write_text(head + rest.partition("```")[0])
    lines, warnings, errors = tried(compose([f"reward.functions=[{{path: {tmp_path / 'my_reward.py'}}}]"], "dapo_tiny"))
    assert lines[0].startswith(
        "reward my_reward.py: right answer 1.0, wrong -1.0, empty -1.0 (3 rows; right is 'Answer: "
    )
    assert not warnings and not errors
