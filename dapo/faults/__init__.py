"""Fault handling: lost actors, refused batches, signals, a time limit; and fault injection for tests."""
