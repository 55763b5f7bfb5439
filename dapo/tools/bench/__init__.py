"""Benchmarks of a whole step and of its parts; `README.md` in this folder says what each measures."""
