"""``python -m tilewave``: the same as the command ``tilewave``."""

from tilewave.cli import main

if __name__ == "__main__":
    main()
