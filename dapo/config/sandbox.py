"""Limits of one run of a program that a model wrote, and the libraries it may import. dapo/sandbox/README.md describes
what else the sandbox allows."""

from dataclasses import dataclass

from dapo.config.fields import at_least, key, positive


@dataclass(slots=True)
class SandboxConfig:
    """Limits hold for one run of a program, such as one test of a solution."""

    cpu_s: float = positive(2.0, "CPU seconds of all its threads; beyond them it is stopped, and wrong")
    wall_s: float = positive(
        4.0,
        "seconds in which it had a core or wanted none, as when it sleeps; beyond them it is stopped, and wrong; those "
        "in which a busy machine had no core for it do not count",
    )
    total_s: float = positive(
        5.0, "the same seconds of all tests of one response; tests beyond them are not run and count as failed"
    )
    memory_bytes: int = at_least(1, 512 << 20, "bytes of address space above what Python and `packages` have")
    output_bytes: int = at_least(
        1, 1 << 20, "bytes of each of standard output, standard error, result and any file that it writes"
    )
    files: int = at_least(0, 16, "files in its own temporary directory")
    threads: int = at_least(1, 16, "threads; it gets no further process")
    packages: list[str] = key(
        ["numpy"], "packages that it may import besides the standard library; they are imported once, before"
    )
