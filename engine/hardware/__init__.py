"""What steps cost on some hardware: a table in a file, and the seconds that follow from it.

Pure arithmetic and one file to read: no torch, no clock. Paced ranks wait by it, and whoever
simulates an instance counts by it. Imports `errors`, `echo` and `files`.
"""
