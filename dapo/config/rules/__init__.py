"""Checks of a configuration, one subject per file. Each yields one line per problem, with key, value and remedy;
`dapo.config.checks` calls them."""
