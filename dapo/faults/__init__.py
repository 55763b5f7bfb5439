"""Lets a run go on or end in order: lost actors, refused batches, signals, a time limit; and breaks it in tests."""
