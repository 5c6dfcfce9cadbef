"""Write the report of a run folder: python scripts/report.py runs/NAME."""

import argparse
import sys

from flow_grpo.report import write_report


def main() -> int:
    """Write RUN/report.html and say where it lies; exit code 2 where RUN is no run folder."""
    parser = argparse.ArgumentParser(
        description="Write RUN/report.html: one self-contained page about a run."
    )
    parser.add_argument("run", help="run folder, for example runs/tiny_ocr")
    try:
        path = write_report(parser.parse_args().run)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
