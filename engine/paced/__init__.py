"""Halves of a network that wait instead of computing, and links that take their time.

For looking at scheduling and protocol on a machine that has no such hardware: processes, windows,
doorbells, routing tables and rows are real, but rows are zeros and the time is a table's
(`engine.hardware`). Imports `comm`, `hardware` and the shapes of `model`.
"""
