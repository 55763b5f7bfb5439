"""The process group of the weight sync when a member is lost, with a stand-in for NCCL."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dapo.workers.rendezvous import find_store, serve_store
from dapo.workers.weights.group import BLOCKING_WAIT, WeightGroup
from dapo.workers.weights.sender import GroupTransport, WeightSender

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LONG_S = 60.0  # the group's own deadline, which nothing here may wait for
SOON_S = 20.0


class StandIn:
    """NCCL's group as far as `WeightGroup` uses it: a broadcast ends when `ends` is set, or with the group; connecting
    ends when all are there, and nothing else ends it."""

    made: "list[StandIn]" = []
    all_there = threading.Event()
    Options = SimpleNamespace

    def __init__(self, store, rank, size, options) -> None:
        self.blocking_wait, self.timeout = os.environ.get(BLOCKING_WAIT), options._timeout
        self.ends, self.aborted, self.connected = threading.Event(), 0, None
        self.made.append(self)

    def _set_sequence_number_for_group(self) -> None: ...

    def eager_connect_single_device(self, device) -> None:
        assert self.all_there.wait(SOON_S), "torch gives NCCL no deadline here"
        self.connected = device

    def broadcast(self, data, options):
        return SimpleNamespace(is_completed=self.ends.is_set, wait=lambda timeout: self.ends.is_set())

    def abort(self) -> None:
        self.aborted += 1
        self.ends.set()


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "all_there", threading.Event())
    StandIn.all_there.set()
    return StandIn.made


def in_thread(action):
    """Starts it; returns what waits for it and gives its error, None without."""
    errors = []

    def run() -> None:
        try:
            errors.append(action())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended():
        thread.join(SOON_S)
        assert not thread.is_alive(), "it waits still"
        return errors[0]

    return ended


def pair(timeout_s: float = LONG_S) -> tuple[WeightGroup, WeightGroup]:
    store = serve_store("127.0.0.1", LONG_S)
    groups: dict[int, WeightGroup] = {}

    def meet(rank: int, at: dist.Store) -> None:
        groups[rank] = WeightGroup(at, rank=rank, size=2, device=GPU, timeout_s=timeout_s)

    other = find_store("127.0.0.1", store.port, LONG_S)
    waits = [in_thread(lambda: meet(0, store)), in_thread(lambda: meet(1, other))]
    assert [ended() for ended in waits] == [None, None]
    return groups[0], groups[1]


def test_errors_of_nccl_are_raised_and_end_no_process(nccl, monkeypatch):
    """A thread of torch's would end the process, half a minute after a member is gone."""
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    first, _ = pair()
    assert [each.blocking_wait for each in nccl] == ["1", "1"] and BLOCKING_WAIT not in os.environ
    assert [each.connected for each in nccl] == [GPU, GPU]
    nccl[0].ends.set()
    nccl[1].ends.set()
    first.wait(first.broadcast(torch.zeros(8)))


def test_a_broadcast_of_nccl_that_is_given_up_ends_for_all_who_wait_in_it(nccl):
    sender, receiver = pair()
    waits = [in_thread(lambda group=group: group.wait(group.broadcast(torch.zeros(8)))) for group in (sender, receiver)]
    time.sleep(0.1)
    assert not any(each.aborted for each in nccl)
    sender.close()  # as another thread does, while the rank waits
    for ended in waits:
        assert "given up" in str(ended())
    assert [each.aborted for each in nccl] == [1, 1]
    for group in (sender, receiver):
        with pytest.raises(RuntimeError, match="given up"):
            group.broadcast(torch.zeros(8))
    _, receiver = pair(timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"waited 0.5 s for the others in a broadcast"):
        receiver.wait(receiver.broadcast(torch.zeros(8)))
    assert sum(each.aborted for each in nccl) == 3, "nobody takes it"


@pytest.mark.parametrize("given_up", [False, True])
def test_a_member_that_never_comes_ends_the_wait_for_it(nccl, given_up):
    """NCCL itself would wait for ever."""
    transport = GroupTransport(8, CPU, "127.0.0.1", LONG_S if given_up else 0.5)
    transport._device = GPU
    ended = in_thread(lambda: transport.join(1))
    if given_up:
        transport.close()
    assert ("given up" if given_up else "waited 0.5 s for all 2 members") in str(ended())
    assert nccl == []


@pytest.mark.parametrize("given_up", [False, True])
def test_a_member_that_is_lost_while_nccl_connects_holds_nobody(nccl, given_up):
    """NCCL can be aborted only once it has connected: a thread stays in it, and aborts what comes of it too late."""
    StandIn.all_there.clear()
    sender = GroupTransport(8, CPU, "127.0.0.1", LONG_S if given_up else 0.5)
    sender._device = GPU
    other = find_store("127.0.0.1", sender.endpoint().port, LONG_S)
    meet = lambda: WeightGroup(other, rank=1, size=2, device=GPU, timeout_s=LONG_S if given_up else 0.5)  # noqa: E731
    waits = [in_thread(lambda: sender.join(1)), in_thread(meet)]
    if given_up:
        while len(nccl) < 2:
            time.sleep(0.01)
        sender.close()
    for ended in waits:
        assert ("given up" if given_up else "waited 0.5 s for NCCL to connect") in str(ended())
    assert not any(each.aborted for each in nccl)
    StandIn.all_there.set()
    deadline = time.monotonic() + SOON_S
    while [each.aborted for each in nccl] != [1, 1]:
        assert time.monotonic() < deadline, "a group that nobody holds would warn, or end the process"
        time.sleep(0.01)


def test_what_nccl_says_where_it_does_not_connect_is_told(nccl, monkeypatch):
    def refused(self, device) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(StandIn, "eager_connect_single_device", refused)
    with pytest.raises(RuntimeError, match="unhandled system error"):
        WeightGroup(serve_store("127.0.0.1", LONG_S), rank=0, size=1, device=GPU, timeout_s=LONG_S)


def test_an_end_that_is_opened_again_leaves_the_group_before(nccl):
    """The destructor of NCCL's group warns, and ends the process where it cannot abort."""
    sender = WeightSender(lambda: iter(()), [("a", (2,))], dtype="float32", bucket_bytes=8, rank=0, device=CPU)
    first = sender.open("broadcast", "127.0.0.1", LONG_S)
    sender._transport._device = GPU
    sender.join(0)
    assert nccl[0].aborted == 0 and find_store("127.0.0.1", first.port, LONG_S).check(["here/0"])
    sender.open("broadcast", "127.0.0.1", LONG_S)
    assert nccl[0].aborted == 1
