"""Measuring an engine: offline throughput, and open-loop load on anything that serves.

Imports the launcher and the controller's client; nothing of the ranks.
"""
