"""`python -m nc10d.debug DIR`: find missing, different or late ranks in all ranks' dumps."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from nc10d.debug import timeline, torch_trace
from nc10d.debug.diagnosis import diagnose, report
from nc10d.errors import UnsupportedPlatform
from nc10d.group.flight_recorder import Dump

_ABOUT = """\
Read the dumps that ranks have left in DIR (NC10D_DUMP_DIR, see nc10d.observe) and list the ranks
that are missing, that made another call than the others, or that are late. The exit code is 0 if
all ranks are there and in step, 1 if not, 2 if there are no dumps."""


def read(folder: Path) -> list[list[Dump]]:
    """Return the dumps in a folder, group by group; ValueError names a file that is no dump."""
    groups: dict[str, list[Dump]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            dump = Dump.from_json(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        groups.setdefault(dump.group, []).append(dump)
    return [groups[name] for name in sorted(groups)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nc10d.debug",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw what all ranks did when")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="the same as a picture; needs matplotlib"
    )
    parser.add_argument(
        "--torch", type=Path, metavar="OUT", help="write files for torch's flight-recorder analyser"
    )
    options = parser.parse_args(arguments)
    try:
        groups = read(options.folder)
    except (OSError, ValueError) as error:
        print(f"nc10d.debug: {error}", file=sys.stderr)
        return 2
    if not groups:
        print(f"nc10d.debug: there are no dumps in {options.folder}", file=sys.stderr)
        return 2
    print("\n\n".join(map(report, groups)))
    try:
        if options.html:
            options.html.write_text(timeline.html_page(groups))
        if options.png:
            timeline.write_png(groups, options.png)
        if options.torch:
            torch_trace.write([dump for dumps in groups for dump in dumps], options.torch)
    except (OSError, UnsupportedPlatform) as error:
        print(f"nc10d.debug: {error}", file=sys.stderr)
        return 2
    return 0 if all(diagnose(dumps).clean for dumps in groups) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in a pipe to `head`
    sys.exit(main())
