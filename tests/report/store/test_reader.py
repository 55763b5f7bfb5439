"""What is read back from a store: how groups ended, with a filter and without, and the warnings of a step; and where
its folder cannot be written to."""

import itertools
import subprocess
import sys
from dataclasses import replace

from dapo.algorithm.fate import TRAINED
from dapo.report.store.reader import Reader
from dapo.tools.inspect.page import data
from tests.support.fakes import make_group, make_prompt
from tests.support.store.stored import collected_of, store_in


def test_groups_of_one_accuracy_are_counted_where_nothing_is_filtered(tmp_path):
    """Seven times 0.1 has a mean that is not 0.1, and a variance that is not 0."""
    store = store_in(tmp_path)
    store.begin({})
    accuracies = ([1.0, 1.0], [0.0, 0.0], [0.1] * 7, [0.9] * 7, [1.0, 0.0], [1.0, 0.999999])
    store.step(1, collected_of([make_group(draw, given) for draw, given in enumerate(accuracies)], TRAINED))
    store.step(2, collected_of([make_group(10, [0.0, 0.0]), make_group(11, [0.0, 0.0])], "all_wrong"))
    store.close()
    with Reader(tmp_path) as found:
        first, second = found.steps()
        (groups,) = (
            chart for chart in data(found, "run", 0)["charts"] if chart["title"] == "What became of the groups"
        )
        shares = {line["label"]: line["values"] for line in groups["lines"]}
    assert [first[name] for name in ("trained", "all_correct", "all_wrong", "alike")] == [6, 2, 2, 4]
    assert [second[name] for name in ("trained", "all_correct", "all_wrong", "alike")] == [0, 0, 2, 0]
    assert shares == {"mixed, trained on": [0.33333, 0.0], "all wrong": [0.33333, 1.0], "all correct": [0.33333, 0.0]}


def test_a_prompt_keeps_its_visits_where_the_files_have_changed(tmp_path):
    """Number 1 is another prompt after step 1, and again after step 3 (`checkpoint.accept_changes`)."""

    def group(draw, text):
        one = make_group(draw, [1.0, 0.0])
        return replace(one, draw=replace(one.draw, prompt=replace(make_prompt(1), text=text, ground_truth="4")))

    store = store_in(tmp_path)
    store.begin({})
    draw = itertools.count()
    for step, texts in enumerate(("aa", "bb", "b", "a"), start=1):
        store.step(step, collected_of([*(group(next(draw), text) for text in texts), make_group(next(draw), [1.0])]))
    store.close()
    with Reader(tmp_path) as found:
        visits = {row["prompt"]: row["visits"] for row in found.prompts(20)}
        texts = {number: found.prompt(number)["text"] for number in visits if number < 2}
        assert found.group(0)[0]["question"] == "a" and found.groups(2)[1]["question"] == "b"
    assert texts == {1: "a", -1: "a", -2: "b"}
    assert visits == {1: 1, -1: 2, -2: 3, 2: 1, 5: 1, 7: 1, 9: 1}


# Root may write wherever it wants, unless it gives its capabilities up.
INSPECT = (
    "import sys; from dapo.sandbox.kernel import drop_capabilities; drop_capabilities(); "
    "from dapo.tools.inspect.__main__ import main; main(sys.argv[1:])"
)


def test_a_run_in_a_folder_that_cannot_be_written_to_is_read(tmp_path):
    store = store_in(tmp_path)
    store.begin({})
    store.step(1, collected_of([make_group(1, [1.0, 0.0])]))
    store.close()
    for path in (*tmp_path.iterdir(), tmp_path):
        path.chmod(0o555)
    try:
        done = subprocess.run([sys.executable, "-c", INSPECT, str(tmp_path)], capture_output=True, text=True)
    finally:
        tmp_path.chmod(0o755)
    assert done.stdout.startswith("1 steps\n"), done.stderr
