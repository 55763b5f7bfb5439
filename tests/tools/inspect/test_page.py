"""The page of a run: small, whole, loading nothing, and whatever a model wrote is text in it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dapo.tools.inspect
from dapo.tools.inspect.__main__ import main
from dapo.tools.inspect.groups import STEPS, bounded, shortened
from dapo.tools.inspect.page import LIVE, page
from tests.support.report.shown_run import make_run

HOSTILE = (
    "</script><script>window.owned=1</script></SCRIPT ><!--<script><img src=x onerror=alert(1)>"
    "<style>*{display:none}</style>[[SCRIPT]][[DATA]] &lt; \x1b[2J\x00\u2028\u2029\u202e\ud800 ]]>"
)
ASSETS = Path(dapo.tools.inspect.__file__).parent / "assets"


class Parsed(HTMLParser):
    """Elements with their attributes, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside: dict[str, str] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = {"script": dict(attrs).get("type", "program"), "style": "style"}.get(tag, "")

    def handle_data(self, data):
        if self._open:
            self.inside[self._open] = self.inside.get(self._open, "") + data

    def handle_endtag(self, tag):
        self._open = ""

    @property
    def data(self) -> dict:
        return json.loads(self.inside["application/json"])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """Twelve steps whose answers would do something to a page, one of them a line of 1 MB."""

    def text(draw: int, sample: int) -> str:
        return "y" * 1_000_000 if (draw, sample) == (33, 0) else f"{HOSTILE} {draw} {sample}"

    run = tmp_path_factory.mktemp("run<b>&")
    return make_run(run, 12, n=4, text=text, max_text_bytes=2_000_000)


@pytest.fixture(scope="module")
def hostile_page(hostile) -> str:
    main([str(hostile), "--html", str(hostile / "page.html")])
    return (hostile / "page.html").read_text(encoding="ascii")


def test_a_page_of_200_steps_is_small(tmp_path, capsys):
    make_run(tmp_path, 200, text=lambda draw, sample: f"{draw} {sample} \u4e16" + "thought " * 700 + "Answer: 7")
    main([str(tmp_path), "--html", str(tmp_path / "page.html")])
    text, said = (tmp_path / "page.html").read_text(encoding="ascii"), capsys.readouterr().out
    assert 5e5 < len(text) < 1e6, "as much of the answers as there is room for"
    [found] = Parsed(text).data
    assert found["run"]["steps"] == len(found["columns"]) == 200
    assert len({group["step"] for group in found["groups"]}) >= STEPS
    texts = [answer["text"] for group in found["groups"] for side in group["sides"] for answer in side["answers"]]
    assert all(head and left > 0 and tail.endswith("Answer: 7") for head, left, tail in texts)
    assert {sum(map(len, (head, tail))) + left for head, left, tail in texts} <= set(range(5614, 5622))
    assert re.fullmatch(r"\S+/page\.html: 200 steps, 1 error, \d warnings?, \d notes?, \d\.\d MB\n", said)
    rules = [rule for _, rule, _, _ in found["findings"]]
    assert "entropy falls" in rules and "actors and engines drift apart" in rules
    main([str(tmp_path), "findings"])
    shown = capsys.readouterr().out
    assert all(f"{severity}: {rule}" in shown for severity, rule, _, _ in found["findings"]), "as in the terminal"


def test_what_a_model_wrote_is_data_and_nothing_else(hostile_page):
    parsed = Parsed(hostile_page)
    assert parsed.tags["script"] == 2 and parsed.tags["style"] == 1 and not parsed.tags["img"] and not parsed.tags["b"]
    assert "<" not in parsed.inside["application/json"] and hostile_page.isascii()
    answers = [one for group in parsed.data[0]["groups"] for side in group["sides"] for one in side["answers"]]
    assert any("</script><script>window.owned=1</script>" in one["text"][0] for one in answers)
    [cut] = [one for one in answers if one["text"][1]]
    assert cut["text"][1] == 1_000_000 - 16384
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028-\u202e\ud800]", "".join(one["text"][0] for one in answers))


def test_any_text_comes_back_equal_and_is_inside_the_data():
    given = [{"text": [HOSTILE, "x" * 1_000_000, "\udfff\ud800", *map(chr, range(256))], HOSTILE: None}]
    text = page(given)
    parsed = Parsed(text)
    assert parsed.data == given and text.isascii()
    assert parsed.tags == Parsed(page([])).tags and len(parsed.inside) == 3
    assert "window.owned" not in parsed.inside["program"] + parsed.inside["style"]


def test_nothing_is_loaded_and_no_other_script_may_run(hostile_page):
    parsed = Parsed(hostile_page)
    [policy] = [value or "" for tag, name, value in parsed.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for kind, inside in (("script", "program"), ("style", "style")):
        digest = base64.b64encode(hashlib.sha256(parsed.inside[inside].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for tag, name, value in parsed.attributes:
        assert not name.startswith("on") and name not in ("src", "style", "action"), (tag, name)
        assert name != "href" or (value or "").startswith(("#", "data:,")), value
    addresses = set(re.findall(r"\w+://[\w./]+", hostile_page.replace(parsed.inside["application/json"], "")))
    assert addresses == {"https://github.com/leeoniya/uPlot"}, "in the comment that names the library"


def test_the_program_of_the_page_puts_nothing_in_as_markup():
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    programs = r"\beval\b|new Function|fetch\(|XMLHttpRequest|import\("
    for path in ASSETS.glob("*.js"):
        banned = programs.replace("fetch\\(|", "") if path.name == LIVE else programs
        assert not re.search(f"{markup}|{banned}", path.read_text()), path.name


def test_what_the_page_holds_of_a_run(hostile, hostile_page):
    [found] = Parsed(hostile_page).data
    charts = {chart["title"]: chart["lines"] for chart in found["charts"]}
    for title in ("Accuracy", "Reward", "Entropy", "KL divergence", "Importance ratio", "Staleness"):
        assert title in charts
    assert [line["label"] for line in charts["Reward by function"]] == ["format", "math"]
    shares = {line["label"]: line["values"][5] for line in charts["What became of the groups"]}
    assert shares == {"mixed, trained on": 0.66667, "all wrong": 0.33333}
    parts = [line["label"] for line in charts["Where the seconds went"]]
    assert parts == ["generation", "reward", "update", "sync", "driver", "whole step"]
    rates = {line["label"]: line["values"] for line in charts["Pass rates"]}
    assert sum(values[5] for values in rates.values()) == pytest.approx(1.0, abs=1e-4)
    assert rates["none right"] == [0.33333] * 12
    length = {line["label"]: line["values"] for line in charts["Response length"]}
    assert all(20 <= half <= most < 120 for half, most in zip(length["half"], length["nine of ten"], strict=True))
    last = [group for group in found["groups"] if group["step"] == 12]
    kinds = [kind for group in last for kind in group["kinds"]]
    assert sorted(kinds) == ["best", "longest", "most split", "truncated", "unscorable", "worst"]
    for group in last:
        counts = {side["side"]: side["all"] for side in group["sides"]}
        assert sum(counts.values()) == 4 and counts["no verdict"] == (group["draw"] % 3 == 2)
        assert all(len(side["answers"]) == min(side["all"], 3) for side in group["sides"])
    assert found["events"][0][2:] == ["warning", "engine 1 is lost"]
    assert ["algorithm.clip_ratio_high", "0.28"] in found["config"]
    assert found["run"]["name"] == hostile.name


def test_texts_are_shortened_and_groups_left_out_until_they_fit():
    text = "".join(chr(97 + number % 26) for number in range(1000))
    once = shortened([text, 0, ""], 300)
    assert once == [text[:100], 700, text[-200:]]
    assert shortened(once, 150) == [text[:50], 850, text[-100:]] and shortened(once, 300) == once
    assert shortened(["a\x1bb\n", 0, ""], 300) == ["a\N{REPLACEMENT CHARACTER}b\n", 0, ""]
    answers = {"answers": [{"text": ["a" * 5000, 0, ""]}]}
    groups = [{"question": ["q" * 5000, 0, ""], "sides": [answers], "draw": draw} for draw in range(100)]
    found = bounded(groups, 20_000)
    assert len(json.dumps(found)) <= 20_000 and [group["draw"] for group in found][:2] == [0, 4]


def test_the_command_in_a_fresh_process(hostile, tmp_path):
    """It is given the database alone."""
    shutil.copy(hostile / "samples.sqlite", tmp_path)
    command = [sys.executable, "-m", "dapo.inspect", str(tmp_path / "samples.sqlite"), "--html", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("page.html: 12 steps") and Parsed((tmp_path / "page.html").read_text()).data
