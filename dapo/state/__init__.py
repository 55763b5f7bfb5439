"""Keeps what survives a crash: the claimed run directory and whole checkpoints."""
