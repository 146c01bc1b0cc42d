"""python -m fedncv."""

import sys

from fedncv.cli import main

sys.exit(main())
