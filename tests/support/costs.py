"""Prints the files of tests that took longest as a table: python -m tests.support.costs [test-results.xml]."""

import sys
from collections import Counter
from xml.etree import ElementTree

ROWS = 30


def table(path: str) -> str:
    """Returns Markdown rows of file, tests and seconds (set-up included) from a JUnit file of pytest."""
    seconds, tests = Counter[str](), Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[file] += float(case.attrib["time"])
        tests[file] += 1
    rows = [f"| `{file}` | {tests[file]} | {spent:.0f} |" for file, spent in seconds.most_common(ROWS)]
    total = f"| all {len(tests)} files | {tests.total()} | {seconds.total():.0f} |"
    return "\n".join(["| file | tests | seconds |", "|---|---|---|", *rows, total])


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else "test-results.xml"))
