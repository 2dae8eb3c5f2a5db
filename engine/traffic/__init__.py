"""Prompts that come over time: traces, Poisson arrivals, lengths. Pure; imports errors, echo and
files, and the reader of numbered lines of `engine.offline`.
"""
