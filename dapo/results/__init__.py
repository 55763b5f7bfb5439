"""What a run has come to, from its files: at its end as `summary.json`, and beside other runs (`dapo.compare`)."""
