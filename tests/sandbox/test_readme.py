"""What `dapo/sandbox/README.md` shows is true: its program runs, its table names every file."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "dapo/sandbox/README.md").read_text()


def test_its_program_runs():
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_its_table_is_complete():
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert {path.name for path in (ROOT / "dapo/sandbox").glob("*.py")} - {"__init__.py"} <= named
