"""Output of a run: metrics, log files, lines on the console."""
