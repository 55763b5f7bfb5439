"""Benchmarks of the actors' update, and the yardsticks that it is compared with."""
