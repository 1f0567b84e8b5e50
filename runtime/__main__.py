"""`python -m runtime`."""

import sys

if __name__ == "__main__":
    try:
        from runtime.commands.terminal import hold_on_to_interrupts

        hold_on_to_interrupts()
        from runtime.cli import main

        status = main()
    except KeyboardInterrupt:  # before main could see it
        status = 130
    sys.exit(status)
