"""Makes the report of a run again: `python -m moejax.train.report runs/demo`."""

import sys
from pathlib import Path

from moejax.train.report import write_report

if len(sys.argv) != 2:
    sys.exit("usage: python -m moejax.train.report RUN_FOLDER")
print(write_report(Path(sys.argv[1])))
