"""What the processes of a run listen on, and what their command lines say."""

import psutil

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def processes() -> list[psutil.Process]:
    """This process and all below it."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def listening() -> list[tuple[str, str]]:
    """Name of the process and address, for each socket that takes connections or datagrams from elsewhere."""
    found = []
    for process in processes():
        try:
            sockets = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        waiting = [each for each in sockets if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and not each.raddr]
        found += [(process.name(), each.laddr.ip) for each in waiting if each.laddr]
    return found


def command_lines() -> str:
    lines = []
    for process in processes():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines)
