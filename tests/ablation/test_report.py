"""The ablation ladder's tables and picture, on made-up runs."""

import math
from pathlib import Path

import pytest

from dapo.ablation import __main__ as ablation
from dapo.ablation.report import table, write_report
from dapo.ablation.results import RUNGS, T_975, Curve, estimate, read_ladder, read_run, run_folder
from tests.support.ablation.ladder import cells, write_run


def student_t_cdf(t: float, df: int) -> float:
    """Integrates the density by Simpson's rule."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    count = 2000
    values = [scale * (1 + (t * i / count) ** 2 / df) ** (-(df + 1) / 2) for i in range(count + 1)]
    weights = [1, *([4, 2] * (count // 2))[: count - 1], 1]
    return 0.5 + t / count / 3 * sum(w * v for w, v in zip(weights, values, strict=True))


@pytest.mark.parametrize("df", [1, 2, 3, 5, 10, 20, 30])
def test_the_quantiles_are_those_of_the_distribution(df: int) -> None:
    assert student_t_cdf(T_975[df - 1], df) == pytest.approx(0.975, abs=2e-5)


def test_an_interval_by_hand() -> None:
    found = estimate([0.50, 0.60, 0.70])
    assert found.mean == pytest.approx(0.6)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert estimate([0.01, 0.03]).half_width == pytest.approx(12.706 * 0.01)


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        pytest.param([0.10, 0.11, 0.12], True, id="above-0"),
        pytest.param([-0.10, -0.11, -0.12], True, id="below-0"),
        pytest.param([0.10, 0.00, 0.12], False, id="contains-0"),
        pytest.param([0.5], False, id="one-seed"),
        pytest.param([0.0, 0.0], False, id="no-difference"),
    ],
)
def test_resolved_means_that_the_interval_leaves_out_0(values: list[float], resolved: bool) -> None:
    assert estimate(values).resolved == resolved


def test_a_run_is_read_with_its_totals(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [0.4, 0.5, 0.7])
    run = read_run(run_folder(tmp_path, "grpo", 0))
    assert run == Curve(
        accuracy=((0, 0.4), (1, 0.5), (2, 0.7)),
        optimizer_steps=(0.0, 4.0, 8.0),
        tokens=(0.0, 1.5e6, 3.0e6),
        seconds=(0.0, 1.5, 3.0),
        of_steps={
            "entropy": (0.5, 0.25),
            "length": (31.0, 32.0),
            "truncated": (0.2, 0.1),
            "clipped": (0.01, 0.01),
            "grad_norm": (0.5, 1.0),
            "all_correct": (0.1, 0.2),
            "all_wrong": (0.3, 0.3),
        },
    )
    assert (run.first("entropy"), run.late("entropy")) == (0.5, 0.25)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """The seeds lie 0.2 apart, the rungs 0.1 within each seed: only the paired interval tells them apart."""
    for seed, base in enumerate((0.3, 0.5, 0.7)):
        write_run(tmp_path, "grpo", seed, [0.2, base])
        write_run(tmp_path, "clip_higher", seed, [0.2, base + 0.09 + 0.01 * seed])
        write_run(tmp_path, "token_mean", seed, [0.2, base + 0.1 * (seed - 1)])
    naive, clip, token = cells(table(*read_ladder(tmp_path, ["grpo", "clip_higher", "token_mean"], [0, 1, 2])))
    assert naive == [
        *("1 naive GRPO", "0.500 ± 0.497", "", "", "1.50", "4", "2", "10%, 30%"),
        *("20.0% → 20.0%", "31 → 31", "0.500 → 0.500", "1.00%", "30"),
    ]
    assert clip[:4] == ["2 + clip-higher", "0.600 ± 0.522", "+0.100 ± 0.025", "1"]
    assert token[2:4] == ["-0.100 ± 0.224 (unresolved)", "2"]


def test_the_other_filter_is_compared_with_the_paper_s(tmp_path: Path) -> None:
    for rung, accuracy in (("token_mean", 0.5), ("dynamic_sampling", 0.7), ("filter_by_reward", 0.6)):
        for seed in (0, 1, 2):
            write_run(tmp_path, rung, seed, [0.2, accuracy + 0.001 * seed**2])
    text = table(*read_ladder(tmp_path, ["token_mean", "dynamic_sampling", "filter_by_reward"], [0, 1, 2]))
    assert [row[2:4] for row in cells(text)] == [["", ""], ["+0.200 ± 0.000", "1"], ["-0.100 ± 0.000", "2"]]
    assert "| a filter on accuracy is better than one on the shaped reward | last accuracy | +0.1 ± 0 | held |" in text


@pytest.mark.parametrize(
    ("entropies", "here"),
    [
        pytest.param([0.30, 0.31, 0.33], "held", id="above"),
        pytest.param([0.10, 0.11, 0.12], "refuted", id="below"),
        pytest.param([0.10, 0.20, 0.40], "unresolved", id="both"),
        pytest.param([0.30], "unresolved", id="one-seed"),
    ],
)
def test_a_claim_is_a_number_with_its_interval(entropies: list[float], here: str, tmp_path: Path) -> None:
    for seed, entropy in enumerate(entropies):
        write_run(tmp_path, "overlong_filtering", seed, [0.2, 0.5], entropy=0.2 + 0.001 * seed)
        write_run(tmp_path, "clip_higher", seed, [0.2, 0.5], entropy=entropy)
    text = table(*read_ladder(tmp_path, ["overlong_filtering", "clip_higher"], list(range(len(entropies)))))
    (row,) = [line for line in text.splitlines() if line.startswith("| clip-higher keeps")]
    assert row.endswith(f"| {here} |") and row.split("|")[3].strip().startswith("+" if here != "refuted" else "-")


def test_one_seed_resolves_nothing(tmp_path: Path) -> None:
    for rung, accuracy in (("grpo", 0.1), ("overlong_filtering", 0.9)):
        write_run(tmp_path, rung, 3, [0.1, accuracy])
    text = table(*read_ladder(tmp_path, ["grpo", "overlong_filtering"], [3]))
    first, second = cells(text)
    assert first[1] == "0.100 ± -" and second[2] == "+0.800 ± - (unresolved)"
    assert "One seed gives no interval" in text


def test_unfinished_seeds_are_left_out_by_name(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "grpo", seed, [0.1, 0.5])
        write_run(tmp_path, "clip_higher", seed, [0.1, 0.6])
    write_run(tmp_path, "grpo", 2, [0.1, 0.9])
    write_run(tmp_path, "clip_higher", 2, [0.1, 0.9], total_steps=5)
    write_run(tmp_path, "grpo", 4, [0.1, None])
    text = table(*read_ladder(tmp_path, ["grpo", "clip_higher"], [0, 1, 2, 4]))
    assert [row[1][:5] for row in cells(text)] == ["0.500", "0.600"]
    assert "Mean over seeds 0, 1 " in text
    assert "seed 2: clip_higher (1 of 5 steps)" in text
    assert "seed 4: grpo (no evaluation at step 1); seed 4: clip_higher (missing)" in text
    with pytest.raises(ValueError, match=r"no seed with all its rungs finished: seed 2: clip_higher \(1 of 5 steps\)"):
        read_ladder(tmp_path, ["grpo", "clip_higher"], [2])


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    for number, rung in enumerate(RUNGS):
        for seed in (0, 1, 2):
            write_run(tmp_path, rung, seed, [0.4, 0.5 + 0.01 * seed, 0.6 + 0.05 * number + 0.01 * seed])
    ablation.main(["--report", "--out", str(tmp_path)])
    written = (tmp_path / "ablation.md").read_text()
    assert capsys.readouterr().out.strip() == written.strip()
    assert [row[0][2:] for row in cells(written)] == [rung.label for rung in RUNGS.values()]
    assert [row[-1] for row in cells(written)] == ["30", "36", "38", "41", "42", "50", ""]
    first = (tmp_path / "ablation.png").read_bytes()
    assert first.startswith(b"\x89PNG") and image.imread(tmp_path / "ablation.png")[:, :, :3].std() > 0.05
    write_report(tmp_path, list(RUNGS), [0])
    assert (tmp_path / "ablation.png").read_bytes() != first, "the picture shows what it is given"
