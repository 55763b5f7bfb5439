"""Work for a process of its own, light to import."""

import time
from typing import Any


def work(send: Any, seconds: float) -> None:
    send({"began": True})
    time.sleep(seconds)
    raise ValueError("the first line\nthe second")
