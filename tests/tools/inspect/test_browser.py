"""The page in headless Chromium: wide and narrow, light and dark, with a mouse and with keys, while a run goes on."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.tools.inspect.__main__ import main
from dapo.tools.inspect.serve import Server
from tests.support.report.chromium import PROGRAM, Chromium
from tests.support.report.shown_run import add_steps, make_run

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")]

HOSTILE = "<img src=x onerror='window.owned=1'><script>window.owned=1</script> "
STEPS = 24
# Text that is lost at the right of the window, and boxes that are wider than it.
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Texts whose contrast with what is behind them is below 4.5, as WCAG's level AA asks.
FAINT = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    const color = rgb(getComputedStyle(node).backgroundColor);
    return color[3] === 0 && node.parentElement ? behind(node.parentElement) : color;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const texts = [...node.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
    if (!texts.length || !node.getClientRects().length || node.disabled) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) found.push(node.outerHTML.slice(0, 80));
  }
  return found;
})()"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    made = Chromium(tmp_path / "profile")
    yield made
    made.close()
    assert made.errors == []


def answers(draw: int, sample: int) -> str:
    return f"{HOSTILE}answer {draw}-{sample % 2}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / name, steps, text=answers, n=8) for name, steps in (("one", STEPS), ("two", 10), ("tiny", 1))
    ]


@pytest.fixture
def server(runs: list[Path]) -> Iterator[Server]:
    with Server(runs) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def focused(browser: Chromium) -> str:
    return browser.ask("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")


def test_it_fits_and_can_be_read(browser: Chromium, server: Server, runs: list[Path], tmp_path: Path) -> None:
    main([*map(str, runs), "--html", str(tmp_path / "page.html")])
    for address in (server.address, (tmp_path / "page.html").as_uri()):
        for width in (1440, 390):
            for scheme in ("light", "dark"):
                browser.open(address, width, scheme)
                browser.ask("document.querySelector('details').open = true")
                assert browser.ask(OVERFLOW) <= 0, (address, width)
                assert browser.ask(FAINT) == [], (address, width, scheme)
    assert browser.ask("window.owned") is None
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert HOSTILE.strip() in browser.ask("byId('group').textContent")
    assert "answers are the same: samples" in browser.ask("byId('group').textContent")


def test_keys_reach_every_chart_and_move_all_of_them(browser: Chromium, server: Server) -> None:
    browser.open(server.address, 1440)
    seen: list[str] = []
    while "Staleness" not in seen:
        browser.press("Tab")
        seen.append(focused(browser))
        assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") != "none", seen[-1]
        assert len(seen) < 200, seen
    assert seen.index("What to look at") < seen.index("Accuracy") < seen.index("Held-out accuracy")
    browser.press("Home", "ArrowRight", "ArrowRight")
    said = browser.ask("[...document.querySelectorAll('.plot')].map((node) => node.getAttribute('aria-valuetext'))")
    assert sum(text.startswith("step 3: ") for text in said) > len(said) / 2, said
    whole = browser.ask("charts.get('Accuracy').plot.scales.x.max")
    browser.press("+")
    browser.until(f"charts.get('Accuracy').plot.scales.x.max < {whole}")
    browser.press("Escape")
    browser.until(f"charts.get('Accuracy').plot.scales.x.max === {whole}")


def test_a_drag_zooms_all_charts_and_a_legend_hides_a_line(browser: Chromium, server: Server) -> None:
    browser.open(server.address, 1440)
    browser.ask("charts.get('Reward').figure.scrollIntoView()")
    left, top, width, height = browser.ask(
        "(() => { const box = charts.get('Reward').plot.over.getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )
    browser.drag((left + width / 4, top + height / 2), (left + width / 2, top + height / 2))
    low, high = browser.until("view.zoom")
    assert 5 < low < 8 and 11 < high < 14
    shown = "[...charts.values()].map(({ plot }) => [plot.scales.x.min, plot.scales.x.max])"
    browser.until(f"{shown}.every(([low, high]) => low === view.zoom[0] && high === view.zoom[1])")
    browser.ask("byId('whole').click()")
    assert browser.until("view.zoom === null")
    lines = browser.ask("charts.get('Reward').plot.series.length")
    browser.ask("charts.get('Reward').legend.querySelector('button').click()")
    assert browser.ask("charts.get('Reward').plot.series.length") == lines - 1
    browser.ask("document.querySelector('#several button').click()")
    assert browser.ask("charts.get('Accuracy').plot.series.length") == 3, "the step, and two runs of three"
    assert browser.ask("charts.get('Accuracy').plot.series[2].points.show(charts.get('Accuracy').plot, 2, 0, 1)")


def test_new_steps_appear_and_what_was_chosen_stays(browser: Chromium, server: Server, runs: list[Path]) -> None:
    browser.open(server.address, 1440)
    browser.until("byId('group').textContent")
    browser.ask("document.querySelector('details').open = true")
    browser.ask("chooser.steps.value = '5'; choose()")
    group = browser.until("byId('group').textContent.startsWith('step 5,') && byId('group').textContent")
    browser.ask("zoom([4, 9]); charts.get('Entropy').box.focus(); window.scrollTo(0, 700)")
    store = SampleStore(runs[0], LoggingConfig(), warn=pytest.fail)
    add_steps(store, range(STEPS + 1, STEPS + 4), STEPS + 3, answers, n=8)
    store.close()
    browser.until(f"byId('figures').textContent.includes('steps{STEPS + 3}')")
    assert browser.ask("[window.scrollY, view.zoom, document.querySelector('details').open]") == [700, [4, 9], True]
    assert browser.ask("byId('group').textContent") == group and focused(browser) == "Entropy"
    browser.ask("zoom(null)")
    browser.until(f"charts.get('Accuracy').plot.scales.x.max === {STEPS + 3.5}")
    assert browser.ask("chooser.steps.options.length") == STEPS + 3


def test_a_search_finds_answers_of_every_run(browser: Chromium, server: Server) -> None:
    browser.open(server.address, 390)
    browser.ask("byId('text').focus(); byId('text').value = 'ANSWER 4-1'")
    browser.press("Enter")
    hits = browser.until("[...document.querySelectorAll('#hits li')].map((node) => node.textContent)")
    assert sum(hit.startswith("one, step 2, draw 4") for hit in hits) == 4
    assert sum(hit.startswith("two, ") for hit in hits) == 4 and not any(hit.startswith("tiny") for hit in hits)
    assert browser.ask("document.querySelector('#hits mark').textContent") == "answer 4-1"
    browser.ask("document.querySelector('#hits button').click()")
    assert browser.until("byId('group').textContent.startsWith('step 2, draw 4')")
    assert browser.ask(OVERFLOW) <= 0


def test_a_chart_can_be_saved(browser: Chromium, server: Server, tmp_path: Path) -> None:
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(server.address, 1440)
    for kind in (1, 2):
        browser.ask(f"charts.get('Held-out accuracy').figure.querySelector('.saves button:nth-child({kind})').click()")
    picture, numbers = tmp_path / "Held-out-accuracy.png", tmp_path / "Held-out-accuracy.csv"
    browser.until("new Promise((done) => setTimeout(() => done(true), 500))")
    assert picture.read_bytes().startswith(b"\x89PNG")
    first, *rest = numbers.read_text().splitlines()
    assert first == '"step","one","one low","one high"' and rest[0].startswith("20,0.5")
    assert json.loads(f"[{rest[0]}]")[0] == 20
