"""Runs functions of a person's own in place of built-in ones: loss, advantages, weights of tokens, filter of groups."""
