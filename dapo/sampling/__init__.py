"""Turns draws into batches of mixed groups (Eq. 11): the stream, the oversampling buffer and its bookkeeping."""
