"""Transfer of parameters from actor ranks to engines: buckets, transports, sender and receiver."""
