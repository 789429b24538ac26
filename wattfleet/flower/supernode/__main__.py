"""`wattfleet-supernode`, also as `python -m wattfleet.flower.supernode`."""

import sys


def main() -> None:
    """Run the command, or print what to install."""
    try:
        from wattfleet.flower.supernode import command
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        sys.exit("wattfleet-supernode: Flower is not installed: pip install 'wattfleet[flower]'")
    command.main()


if __name__ == "__main__":
    main()
