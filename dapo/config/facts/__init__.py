"""Reads what a configuration is checked against: files of a model, the source of the installed vLLM."""
