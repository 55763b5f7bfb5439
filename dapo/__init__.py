"""Implements DAPO on Ray: the algorithm and the driver (arXiv 2503.14476)."""
