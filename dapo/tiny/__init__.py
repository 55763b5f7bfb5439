"""Holds a tiny arithmetic task with its tokenizer, data and base model, so that the whole loop runs on a two-core CPU.

It stands apart from the algorithm: nothing here imports the rest of `dapo`, and nothing there imports this.
"""
