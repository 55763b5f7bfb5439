"""The Ray cluster of a test's process, as other processes find it."""

import ray


def cluster_address() -> str:
    """HOST:PORT of its head, by a name of loopback that Ray takes as it is: the usual ones it replaces by the machine's
    address, where a cluster of our own does not listen."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return f"[::ffff:{host}]:{port}"


def join_cluster() -> str:
    """The override that has a program join it."""
    return f'trainer.ray_address="{cluster_address()}"'


def session_directory() -> str:
    """Where its processes write their logs."""
    node = ray._private.worker._global_node
    assert node is not None
    found: str = node.get_session_dir_path()
    return found
