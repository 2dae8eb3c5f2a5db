"""One script for each of those that are compared, run by the Python of its own environment: it
loads a model once, then runs rounds on command. They import each other; only with_asapctl imports
the engine.
"""
