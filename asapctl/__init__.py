"""The command line: one module a command, and how things look. Calls engine; no engine logic."""
