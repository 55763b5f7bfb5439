"""How responses are scored: one supervisor for remote workers, and the child processes of one of them."""
