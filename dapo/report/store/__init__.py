"""The sample store: what a run sampled, and why each group was trained on or dropped, in one SQLite database."""
