"""Runs one vLLM engine in a Ray actor, and keeps its place on the driver when its processes die."""
