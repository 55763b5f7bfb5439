"""Scoring of responses: supervision of the remote workers, and the child processes of one worker."""
