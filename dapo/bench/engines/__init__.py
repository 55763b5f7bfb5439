"""Benchmarks of engines: their decoding, their host's share, their turns with actors, their weights."""
