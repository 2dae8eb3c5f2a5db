"""`python -m asapctl`, where the program itself is not on the path."""

from asapctl.cli import main

main()
