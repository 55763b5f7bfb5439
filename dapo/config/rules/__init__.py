"""Checks a configuration, one subject per file: problems out, each in one line, with key, value and remedy;
`dapo.config.checks` asks them all."""
