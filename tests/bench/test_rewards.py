"""The benchmark of scoring: its answers are ordinary ones, and a short run gives figures."""

import pytest

from dapo.bench.__main__ import main
from dapo.bench.rewards import CHARS, ordinary_answers
from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.functions import RewardFunctions


@pytest.mark.parametrize("function", ["math", "math_verify", "gsm8k"])
def test_about_half_of_the_answers_are_right(function: str) -> None:
    functions = RewardFunctions([RewardFunctionConfig(path=function)])
    items = ordinary_answers(400, function)
    right = [functions.score(item.source, item.text, item.ground_truth).accuracy for item in items]
    assert 0.4 < sum(right) / len(right) < 0.6
    assert all(CHARS < len(item.text) < CHARS + 60 for item in items)


def test_a_short_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rewards", "--responses", "200", "--children", "2"])
    head, names, _, row, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("200 responses of 2000 characters, ")
    cells = dict(zip(names.split(" | "), row.split(" | "), strict=True))
    assert cells["children"] == "2"
    assert all(float(cells[name]) > 0 for name in ("verdicts/s", "verdicts/s per core", "p50 ms", "bare calls/s"))


def test_too_few_responses_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"^dapo.bench: `--responses` \(10\) must be at least 100"):
        main(["rewards", "--responses", "10"])
