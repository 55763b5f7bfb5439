"""Makes what a person sees of a run: metrics, log files, lines on the console."""
