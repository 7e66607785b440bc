"""`python -m weightcast` is the command `weightcast`."""

from weightcast.cli import main

main()
