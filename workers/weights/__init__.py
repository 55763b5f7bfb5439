"""How parameters travel from actor ranks to engines: buckets, transports, both ends."""
