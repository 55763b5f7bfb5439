"""Where processes of a group meet: on one address, and nowhere else."""

import psutil
import pytest

from dapo.workers.rendezvous import find_store, serve_store


def listening() -> list[tuple[str, int]]:
    sockets = psutil.Process().net_connections("inet")
    return sorted((each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN)


def test_a_store_listens_on_its_address_alone() -> None:
    before = listening()
    store = serve_store("127.0.0.1", 20)
    assert [each for each in listening() if each not in before] == [("127.0.0.1", store.port)]
    find_store("127.0.0.1", store.port, 20).set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.1", 20, store.port)
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):  # of no machine
        serve_store("203.0.113.1", 20)
    del store
    assert listening() == before
