"""`python -m runtime`."""

import sys

if __name__ == "__main__":
    try:
        from runtime.cli import main

        status = main()
    except KeyboardInterrupt:  # before main could see it
        status = 130
    sys.exit(status)
