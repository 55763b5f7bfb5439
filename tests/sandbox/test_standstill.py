"""A server that takes nothing any more holds nobody up for ever."""

import os
import signal
from contextlib import suppress

import pytest

from dapo.config.sandbox import SandboxConfig
from dapo.sandbox import client
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import Program, SandboxError


@pytest.mark.timeout(60)
def test_who_sends_to_a_server_that_stands_still_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the socket is full of programs that nobody takes, sending another would block."""
    monkeypatch.setattr(client, "SETUP_S", 0.2)
    with Sandbox(SandboxConfig(cpu_s=20.0, wall_s=20.0)) as sandbox:
        os.kill(sandbox.pid, signal.SIGSTOP)
        try:
            with suppress(OSError):
                while True:
                    sandbox._requests.send(b"{}")
            with pytest.raises(SandboxError, match="no outcome"):
                sandbox.run(Program(source="print(1)"))
        finally:
            os.kill(sandbox.pid, signal.SIGKILL)
