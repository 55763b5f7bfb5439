"""DAPO on Ray: the algorithm and the driver (arXiv 2503.14476)."""

import sys
from pathlib import Path

# `python -m dapo.plan` is `dapo/tools/plan`; code imports `dapo.tools.plan`.
__path__.append(str(Path(__file__).parent / "tools"))

if sys.argv[:1] == ["-m"]:  # python -m dapo.COMMAND, whose modules are not loaded yet
    from dapo.ground.uncaught import install

    install()
