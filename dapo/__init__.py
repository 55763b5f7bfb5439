"""DAPO on Ray: the algorithm and the driver (arXiv 2503.14476)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo.api import Run, evaluate, inspect, train

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "evaluate", "inspect", "train"]

# `python -m dapo.plan` is `dapo/tools/plan`; code imports `dapo.tools.plan`.
__path__.append(str(Path(__file__).parent / "tools"))

if sys.argv[:1] == ["-m"]:  # python -m dapo.COMMAND, whose modules are not loaded yet
    from dapo.ground.uncaught import install

    install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dapo import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
