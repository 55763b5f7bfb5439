"""Checks a configuration, one subject per file: problems out, each in one line; `dapo.config.checks` asks them all."""
