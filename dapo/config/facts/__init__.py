"""Reads what a configuration is checked against: model files, and the installed vLLM's source."""
