"""The weight sync without Ray and engines: the plan, the digest, the sender's memory, the group."""

import threading
import weakref

import pytest
import torch

from dapo.workers.rendezvous import find_store, serve_store
from dapo.workers.weights import bucket as weight_bucket
from dapo.workers.weights.bucket import digest, plan_buckets
from dapo.workers.weights.group import WeightGroup
from dapo.workers.weights.memory import open_shared
from dapo.workers.weights.sender import WeightSender, make_transport

CPU = torch.device("cpu")
SHAPES = [("embedding", (50, 8)), ("q", (8, 8)), ("k", (3, 8)), ("norm", (7,)), ("up", (24, 8)), ("scalar", ())]


@pytest.mark.parametrize("bucket_bytes", [1, 300, 512, 10_000])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_holds_every_tensor_once_in_order_within_the_bound(bucket_bytes, itemsize):
    plans = plan_buckets(SHAPES, bucket_bytes=bucket_bytes, itemsize=itemsize)
    assert [(place.name, place.shape) for plan in plans for place in plan.tensors] == SHAPES
    for plan in plans:
        starts = [place.start for place in plan.tensors]
        assert starts == [0] + [place.stop for place in plan.tensors[:-1]]
        used = plan.tensors[-1].stop * itemsize
        assert used <= bucket_bytes or len(plan.tensors) == 1
        assert plan.num_bytes % 8 == 0 and 0 <= plan.num_bytes - used < 8
    for plan, after in zip(plans, plans[1:], strict=False):
        assert (plan.tensors[-1].stop + after.tensors[0].stop) * itemsize > bucket_bytes, "a bucket left room"


def words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64)


def plain_digest(values: list[int]) -> str:
    """The same in Python's whole numbers."""
    bound, total = 1 << 64, 0
    for position, value in enumerate(values):
        mixed = (value + position * 0x9E3779B97F4A7C15) % bound
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = mixed * factor % bound
            mixed ^= mixed >> 32
        total += mixed
    return f"{total % bound:016x}"


def test_the_digest_is_its_formula_in_chunks_of_any_size(monkeypatch):
    values = words(1000)
    expected = plain_digest(values.tolist())
    for chunk in (1, 7, 1000, 1 << 16):
        monkeypatch.setitem(weight_bucket._WORDS_PER_CHUNK, "cpu", chunk)
        assert digest(values.view(torch.uint8)) == expected
    assert digest(torch.empty(0, dtype=torch.uint8)) == "0" * 16


def test_the_digest_sees_each_bit_and_swaps():
    """Also of words that differ in the highest bit alone, which sums weighted by position miss."""
    values = words(4)
    found = {digest(values.view(torch.uint8))}
    for position in range(4):
        for bit in range(64):
            changed = values.clone()
            changed[position] ^= 1 << bit if bit < 63 else -(1 << 63)
            found.add(digest(changed.view(torch.uint8)))
    assert len(found) == 1 + 4 * 64
    for distance in (1, 2, 1024, 1 << 16):
        values = words(2 * distance)
        for other in (values[distance].item(), values[0].item() ^ -(1 << 63)):
            values[distance] = other
            swapped = values.clone()
            swapped[0], swapped[distance] = values[distance], values[0]
            assert digest(swapped.view(torch.uint8)) != digest(values.view(torch.uint8))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def make_sender(parameters, *, dtype="float32", bucket_bytes=300, rank=0, **more) -> WeightSender:
    return WeightSender(parameters, SHAPES, dtype=dtype, bucket_bytes=bucket_bytes, rank=rank, device=CPU, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10_000])
def test_buckets_carry_the_tensors_in_their_type(dtype, bucket_bytes):
    sender = make_sender(lambda: iter(tensors().items()), dtype=dtype, bucket_bytes=bucket_bytes)
    sender.open("ipc", "", 1)
    arrived = {}
    for index in range(sender.num_buckets):
        bucket = sender.gather(index)
        data = sender._transport.slot(index)[: bucket.plan.num_bytes]
        assert bucket.digest == digest(data)
        for place in bucket.plan.tensors:
            elements = data[: place.stop * getattr(torch, dtype).itemsize].view(getattr(torch, dtype))
            arrived[place.name] = elements[place.start : place.stop].view(place.shape).clone()
    assert list(arrived) == list(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(arrived[name], tensor.to(getattr(torch, dtype)))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_sender_holds_two_buckets_and_one_tensor(transport):
    """Whatever the model's size: memory does not grow with the number of buckets or of syncs."""
    alive = []  # tensors that were gathered

    def gathered():
        for name, shape in SHAPES:
            full = torch.zeros(shape)
            alive.append(weakref.ref(full))
            assert sum(each() is not None for each in alive) == 1
            yield name, full

    sender = make_sender(gathered)
    endpoint = sender.open(transport, "127.0.0.1", 20)
    if transport == "broadcast":
        sender.join(0)  # a group of one
    assert sender.num_buckets > 3
    slots = set()
    for _ in range(3):
        for index in range(sender.num_buckets):
            sender.gather(index)
            slots.add(sender._transport.slot(index).data_ptr())
        assert [each() for each in alive] == [None] * len(alive), "nothing is held between two syncs"
    assert len(slots) == 2
    assert endpoint.capacity == 50 * 8 * 4, "the largest bucket, here one tensor above the bound"


def test_ranks_without_an_end_go_along():
    taken = []

    def gathered():
        for pair in tensors().items():
            taken.append(pair[0])
            yield pair

    sender = make_sender(gathered, rank=1)
    assert sender.open("broadcast", "", 1) is None
    assert [sender.gather(index) for index in range(sender.num_buckets)] == [None] * sender.num_buckets
    assert taken == [name for name, _ in SHAPES]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda given: given.pop("k"), r"expected k \[3, 8\].*gathered norm \[7\]", id="missing"),
        pytest.param(lambda given: given.pop("scalar"), r"expected scalar \[\].*gathered nothing", id="too-few"),
        pytest.param(lambda given: given.update(q=torch.zeros(4, 16)), r"q \[8, 8\].*q \[4, 16\]", id="shape"),
    ],
)
def test_parameters_that_are_not_the_plans_are_refused(change, said):
    given = tensors()
    change(given)
    sender = make_sender(lambda: iter(given.items()))
    sender.open("ipc", "", 1)
    with pytest.raises(RuntimeError, match=said):
        for index in range(sender.num_buckets):
            sender.gather(index)


def test_buckets_out_of_turn_are_refused_and_ends_that_are_opened_again_keep_their_memory():
    """Torch never frees on a GPU what an engine that died had not opened: each start of an engine would take more."""
    sender = make_sender(lambda: iter(tensors().items()), readers=3)
    first = sender.open("ipc", "", 1)
    slots = [slot.data_ptr() for slot in sender._transport._slots]
    sender.gather(0)
    with pytest.raises(RuntimeError, match="bucket 2, but 1 is due"):
        sender.gather(2)
    assert sender.gather(0).index == 0, "a new sync starts over"
    second = sender.open("ipc", "", 1)
    assert [slot.data_ptr() for slot in sender._transport._slots] == slots
    assert (first.capacity, len(first.handles)) == (second.capacity, len(second.handles)) and len(second.handles) == 3
    others = [open_shared(handle, CPU) for handles in second.handles for handle in handles]
    for value, slot in enumerate(sender._transport._slots, start=7):
        slot.fill_(value)
    assert [{*other.tolist()} for other in others] == 3 * [{7}, {8}], "it is the same memory, for each engine there"
    assert sender.gather(0).index == 0
    sender.open("broadcast", "127.0.0.1", 1)
    assert not hasattr(sender._transport, "renew")


def test_a_broadcast_reaches_all_and_a_missing_member_ends_the_wait():
    store = serve_store("127.0.0.1", 20)
    received = torch.zeros(16, dtype=torch.uint8)

    def member() -> None:
        group = WeightGroup(find_store("127.0.0.1", store.port, 20), rank=1, size=2, device=CPU, timeout_s=20)
        group.wait(group.broadcast(received))

    thread = threading.Thread(target=member)
    thread.start()
    transport = make_transport("broadcast", 16, rank=0, device=CPU, address="127.0.0.1", timeout_s=2)
    transport._store = store
    transport.join(1)
    transport.slot(0).copy_(torch.arange(16))
    transport.send(0, transport.slot(0))
    thread.join(20)
    assert received.tolist() == list(range(16))
    transport.send(1, transport.slot(1))  # nobody takes it any more
    with pytest.raises(RuntimeError):
        transport.slot(3)
