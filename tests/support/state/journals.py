"""Journals of a few records, and what is read from them (tests only)."""

from pathlib import Path

from dapo.state.journal import Journal


def opened(directory: Path, warnings: list[str] | None = None, settings: str = "n=4") -> Journal:
    return Journal(directory / "journal", settings, warn=(warnings if warnings is not None else []).append)


def read(directory: Path, version: int = 0) -> tuple[list[bytes], list[str]]:
    warnings: list[str] = []
    return opened(directory, warnings).read(version), warnings
