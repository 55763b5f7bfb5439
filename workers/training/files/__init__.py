"""Holds what a rank reads from and writes to files: weights of a model, checkpoints, exports, adapters."""
