"""`python -m parallax`."""

from parallax.cli import main

# Rank processes import this file again, under another name, and must not start the command.
if __name__ == "__main__":
    main()
