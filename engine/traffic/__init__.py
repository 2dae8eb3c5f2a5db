"""Prompts that come over time: traces, Poisson arrivals, lengths. Pure; imports errors, echo and
files, and of `engine.offline` the reader of numbered lines and the check of how a file begins.
"""
