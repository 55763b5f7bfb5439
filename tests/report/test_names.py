"""Every metric has one line in dapo/report/README.md, and nothing is logged that has none."""

import json
import re
from pathlib import Path

import pytest

from tests.support.report.reference import FAMILIES, HISTOGRAMS, NAMES, Family, undocumented

ROOT = Path(__file__).resolve().parents[2]
# What stands between quotes in the code and looks like a metric: with the braces of an f-string in it.
WRITTEN = re.compile(rf'f?"((?:{"|".join(family.prefix for family in FAMILIES)})/[A-Za-z_{{}}]+)"')


def test_no_name_stands_twice() -> None:
    assert len(NAMES) == len(set(NAMES)) > 90 and len(HISTOGRAMS) == 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_the_file_that_makes_a_family_exists_and_writes_its_prefix(family: Family) -> None:
    assert family.files and all((ROOT / file).is_file() for file in family.files)
    assert f'"{family.prefix}/' in "".join((ROOT / file).read_text(encoding="utf-8") for file in family.files)


def test_names_of_persons_are_known_by_their_place() -> None:
    assert undocumented(["step", "reward/my function", "reward/failed_oom", "eval/math-500/accuracy"]) == []
    wrong = ["actor/loss2", "eval/accuracy2", "parity/staleness_2/esss", "x"]
    assert undocumented([*wrong, "parity/staleness_2/ess"]) == wrong


def test_what_the_code_logs_is_documented() -> None:
    found = set()
    for folder in ("dapo", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(WRITTEN.findall(path.read_text(encoding="utf-8")))
    assert len(found) > 50
    # A name may go on behind the quotes, and an f-string names several: one of ours must begin like it.
    for name in found:
        pattern = re.compile(re.sub(r"\{\w+\}", ".+", name))
        assert name in HISTOGRAMS or undocumented([name]) == [] or any(pattern.match(one) for one in NAMES), name


def test_a_line_of_a_file_is_checked_by_its_names(tmp_path: Path) -> None:
    line = json.loads('{"step": 1, "actor/loss": 0.1, "actor/made_up": 1}')
    assert undocumented(line) == ["actor/made_up"]
