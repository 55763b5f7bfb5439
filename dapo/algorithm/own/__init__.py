"""User-defined functions in place of built-in ones: loss, advantages, token weights, group filter."""
