"""`python -m opsmith.cli` is the command `opsmith`."""

from opsmith.cli import main

if __name__ == "__main__":
    main()
