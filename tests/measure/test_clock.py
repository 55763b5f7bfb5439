"""The clock of phases: overlaps count once, the rest is the driver's."""

from dapo.measure.clock import PhaseClock


def test_the_clock_counts_overlaps_once_and_the_rest_as_driver(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dapo.measure.clock.time.monotonic", lambda: now[0])
    clock = PhaseClock()
    with clock("generation"):
        now[0] += 1
        with clock("generation"), clock("reward"):
            now[0] += 2
    now[0] += 4
    assert clock.lap() == {"driver": 4.0, "generation": 3.0, "reward": 2.0, "step": 7.0}
    assert clock.lap() == {"driver": 0.0, "step": 0.0}
