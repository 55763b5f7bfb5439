"""Computes which roles fit on which nodes, without Ray: what each role requests, and what the nodes have."""
