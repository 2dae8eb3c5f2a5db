"""A file of prompts in, a file of results out: lines, parsing, records, resume, the loop.

`job` puts one run together from paths and options and is what a command calls. Imports nothing
of the workers: the engine is a `runner.Engine`, whoever provides it.
"""
