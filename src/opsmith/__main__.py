"""`python -m opsmith` is the command `opsmith`."""

from opsmith.cli import main

if __name__ == "__main__":
    main()
