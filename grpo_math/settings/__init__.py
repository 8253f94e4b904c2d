"""A recipe and a command line -> settings that are checked one by one and together."""
