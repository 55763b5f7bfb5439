"""The checks, one subject per file; `dapo.doctor.checks` lists them all."""
