"""Turns draws into a batch of mixed groups (Eq. 11): the stream, the oversampling buffer and its books."""
