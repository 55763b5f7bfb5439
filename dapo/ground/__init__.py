"""What every part may use: console, watchdog, files, clock, signals. Imports nothing of ours."""
