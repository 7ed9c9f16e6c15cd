"""The command `opsmith`, as `python -m opsmith`."""

from opsmith.cli import main

if __name__ == "__main__":
    main()
