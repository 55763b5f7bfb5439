"""DAPO on Ray: the algorithm and the driver (arXiv 2503.14476)."""

import sys

if sys.argv[:1] == ["-m"]:  # python -m dapo.COMMAND, whose modules are not loaded yet
    from dapo.report.uncaught import install

    install()
