"""`python -m runtime.cli`: the same as `troupe`."""

import sys

from runtime.cli import main

sys.exit(main())
