"""Programs that print the tables of docs/performance.md; `make bench` runs them in order."""
