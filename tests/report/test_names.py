"""Every metric has one line in dapo/report/README.md, and nothing is logged that has none."""

import re
from pathlib import Path

from tests.support.report.reference import FAMILIES, HISTOGRAMS, NAMES, undocumented

ROOT = Path(__file__).resolve().parents[2]
# What stands between quotes in the code and looks like a metric: with the braces of an f-string in it.
WRITTEN = re.compile(rf'f?"((?:{"|".join(family.prefix for family in FAMILIES)})/[A-Za-z_{{}}]+)"')


def test_the_reference_names_each_metric_once_and_the_file_that_makes_it() -> None:
    assert len(NAMES) == len(set(NAMES)) > 90 and len(HISTOGRAMS) == 2
    for family in FAMILIES:
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in family.files)
        assert f'"{family.prefix}/' in text, family.prefix


def test_what_the_code_logs_is_documented() -> None:
    paths = [path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in paths for name in WRITTEN.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 50
    # A name may go on behind the quotes, and an f-string names several: one of ours must begin like it.
    for name in found:
        pattern = re.compile(re.sub(r"\{\w+\}", ".+", name))
        assert name in HISTOGRAMS or undocumented([name]) == [] or any(pattern.match(one) for one in NAMES), name
