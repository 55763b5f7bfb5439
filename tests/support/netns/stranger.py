"""A stranger on the machines' network, who calls what listens there: `python stranger.py HOST:PORT ...`.

Prints a line for each, `HOST:PORT CODE`: the status of gRPC, or of HTTP where it does not speak that.
"""

import http.client
import sys

import grpc

# Of the head, a node, its store of objects, a worker, Ray's client: what changes nothing. Each serves some of them.
CALLS = (
    *("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats"),
    *("ObjectManagerService/Pull", "CoreWorkerService/NumPendingTasks", "RayletDriver/ClusterInfo"),
)
ANSWER_S = 5


def called(address: str) -> str:
    said = {_called(address, call) for call in CALLS} - {"UNIMPLEMENTED"}
    if said != {"UNAVAILABLE"}:
        return "+".join(sorted(said)) or "UNIMPLEMENTED"
    try:
        connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
        connection.request("POST", "/get_or_create_runtime_env")
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__


def _called(address: str, call: str) -> str:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


for each in sys.argv[1:]:
    print(each, called(each))
