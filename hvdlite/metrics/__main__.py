"""`python -m hvdlite.metrics [HOST:PORT]`: what `hvdlite top` does."""

import sys

from .top import main

sys.exit(main())
