"""`wattfleet-superlink`, also as `python -m wattfleet.flower.superlink`."""

import sys


def main() -> None:
    """Run the command, or print what to install."""
    try:
        from wattfleet.flower.superlink import command
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        sys.exit("wattfleet-superlink: Flower is not installed: pip install 'wattfleet[flower]'")
    command.main()


if __name__ == "__main__":
    main()
