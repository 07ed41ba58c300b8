"""`python -m hvdlite.timeline FILE`."""

import sys

from .analysis import main

sys.exit(main())
