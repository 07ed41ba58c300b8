"""Run the command line by `python -m hvdlite`."""

from .cli import main

if __name__ == "__main__":
    main()
