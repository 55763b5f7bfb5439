"""`python -m dapo.leave [SECONDS]`: tells a run that this node of its Ray cluster goes; `--watch`: when its cloud
says so.

The driver then takes the node's engines out of the run with what they have generated, and saves if ranks are on it.
Ray places nothing new there, and ends what it runs on the node as soon as nothing is left.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.error import HTTPError

from dapo.ground.console import say, warn
from dapo.workers.cluster import tell_going

METADATA_URL = "http://169.254.169.254"  # of all three clouds, unless DAPO_METADATA_URL names another
NOTICE_S = 120.0  # unless SECONDS are given
GCP_NOTICE_S = 30.0
POLL_S, REQUEST_S = 5.0, 10.0
LARGEST = 1 << 20  # bytes of an answer

_without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _ask(path: str, headers: dict[str, str], method: str = "GET") -> str:
    url = os.environ.get("DAPO_METADATA_URL", METADATA_URL) + path
    request = urllib.request.Request(url, headers=headers, method=method)
    with _without_proxy.open(request, timeout=REQUEST_S) as answer:
        text: str = answer.read(LARGEST).decode()
    return text


def aws() -> float | None:
    """Returns when the machine goes, in seconds since 1970; None if nothing says so. So do the others."""
    token = _ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        notice = _ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    return datetime.fromisoformat(json.loads(notice)["time"]).timestamp()


def gcp() -> float | None:
    """It names no time. Its server answers when the value changes, or after POLL_S."""
    path = f"/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec={POLL_S:g}"
    said = _ask(path, {"Metadata-Flavor": "Google"}).strip()
    if said not in ("TRUE", "FALSE"):
        raise ValueError(f"instance/preempted is {said[:80]!r}, neither TRUE nor FALSE")
    return time.time() + GCP_NOTICE_S if said == "TRUE" else None


def azure() -> float | None:
    """Its events may be those of other machines of the same group. One that has begun names no time."""
    header = {"Metadata": "true"}
    events = json.loads(_ask("/metadata/scheduledevents?api-version=2020-07-01", header))["Events"]
    events = [event for event in events if event["EventType"] in ("Preempt", "Terminate")]
    name = events and _ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    times = [event["NotBefore"] for event in events if name in event["Resources"]]
    return min((parsedate_to_datetime(at).timestamp() if at else time.time() for at in times), default=None)


CLOUDS: dict[str, Callable[[], float | None]] = {"aws": aws, "gcp": gcp, "azure": azure}


def watch(cloud: str) -> None:
    """Returns when a notice was passed on. Failures do not end it; one that repeats is told once."""
    told = ""
    while True:
        began = time.monotonic()
        try:
            if (at := CLOUDS[cloud]()) is not None:
                leave(max(0.0, at - time.time()))
                return
        except Exception as error:
            if (text := " ".join(f"{type(error).__name__}: {error}".split())) != told:
                told = text
                warn(f"`dapo leave --watch {cloud}` tries again every {POLL_S:g} s: {text}")
        time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))


def leave(seconds: float) -> None:
    if nodes := tell_going(seconds):
        say(f"Ray was told that this node goes in {seconds:.0f} s ({', '.join(node[:6] for node in nodes)})")
    else:
        say("this machine has Ray's head, and the run ends with it: a SIGUSR1 to the run's process makes it save first")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dapo leave", description="Tells a run that this node of Ray goes.")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("seconds", type=int, nargs="?", metavar="SECONDS", help=f"until it goes ({NOTICE_S:g})")
    when.add_argument("--watch", choices=CLOUDS, help="wait for the notice of this cloud, which says when")
    given = parser.parse_args(arguments)
    if given.watch:
        watch(given.watch)
        return
    seconds = NOTICE_S if given.seconds is None else given.seconds
    if seconds < 0:
        parser.error(f"SECONDS ({seconds}) must not be negative")
    try:
        leave(seconds)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
