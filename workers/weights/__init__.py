"""Moves parameters from actor ranks to engines: buckets, transports, both ends."""
