"""What a run prints: warnings once an hour, then counted; printing ends no run and sends no controls to a terminal."""

import errno
import io
import sys

import pytest

from dapo.ground.console import end, hearing_warnings, plain, say, take_repeated, warn
from tests.support.clock import Clock


def test_a_warning_that_comes_again_is_counted(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    heard: list[str] = []

    def err() -> list[str]:
        return capsys.readouterr().err.splitlines()

    with hearing_warnings(heard.append):
        for seconds in ("12", "7.5", "1,200.25"):
            warn(f"engine 3 is slow: no token for {seconds} s, 85% of 1.5 GiB free")
        assert err() == ["engine 3 is slow: no token for 12 s, 85% of 1.5 GiB free"]
        assert (take_repeated(), take_repeated()) == (2, 0)
        warn("engine 4 is slow: no token for 12 s, 85% of 1.5 GiB free")
        warn("a batch was set aside (1 in a row; 3 end the run): parity")
        warn("a batch was set aside (2 in a row; 3 end the run): parity")
        assert len(err()) == 3, "another engine, and a count that matters"
        clock.now += 3599
        warn("engine 3 is slow: no token for 13 s, 85% of 1.5 GiB free")
        assert (take_repeated(), err()) == (1, [])
        clock.now += 1
        warn("engine 3 is slow: no token for 14 s, 85% of 1.5 GiB free")
        assert (take_repeated(), err()) == (0, ["engine 3 is slow: no token for 14 s, 85% of 1.5 GiB free"])
        for _ in range(2):
            with pytest.raises(SystemExit):
                end("no space left")
        assert err() == ["dapo: no space left"] * 2
    assert len(heard) == 8
    assert err() == ["3 more times: engine 3 is slow: no token for # s, #% of # GiB free"]
    for _ in range(2):
        warn("engine 3 is slow: no token for 12 s")
    assert (len(err()), len(heard), take_repeated()) == (2, 8, 0), "outside of a run every one is printed"


@pytest.mark.parametrize(
    "loss",
    [
        "engine 0 is lost: its process has ended",
        "reward worker 1 is replaced: no answer for 60 s",
        "function worker 2 is replaced: no answer to its check ([])",
        "judge 0 is lost, and its server is started again (restart 1)",
        "actor ranks were lost (1 of 3): rank 0 has ended",
    ],
)
def test_every_loss_of_a_worker_is_printed(loss: str, capsys: pytest.CaptureFixture) -> None:
    with hearing_warnings(lambda line: None):
        for _ in range(3):
            warn(loss)
    assert capsys.readouterr().err.splitlines() == [loss] * 3


def test_control_characters_and_passwords_are_not_printed(capsys: pytest.CaptureFixture) -> None:
    text = "\x1b]0;owned\x07\x1b[2J\u202eabc\r\x9b31m\tü ✓ \U0001f600 ok"
    with pytest.raises(SystemExit):
        say(text)
        warn(f"{text} at https://me:pw@host/a")
        end(text)
    out, err = capsys.readouterr()
    shown = "\ufffd]0;owned\ufffd\ufffd[2J\ufffdabc \ufffd31m ü ✓ \U0001f600 ok"
    assert out == f"{shown}\n"
    assert err == f"{shown} at https://(redacted)@host/a\ndapo: {shown}\n"
    assert plain("a\nb") == "a\nb"


class Refusing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(errno.EPIPE, "tee has ended")])
def test_a_line_that_cannot_be_written_ends_no_run(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Refusing(error))
    with hearing_warnings(heard.append):
        say("step 1/2")
        warn("engine 3 is lost")
        warn("engine 3 is lost")
    with pytest.raises(SystemExit):
        end("no space left")
    assert heard == ["engine 3 is lost"] * 2
