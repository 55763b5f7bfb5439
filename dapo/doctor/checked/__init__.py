"""Looks at one subject per file: findings out; `dapo.doctor.checks` asks for them all."""
