"""``python -m torchcaps``, which ``torchrun -m torchcaps`` needs too."""

import sys

from torchcaps.cli import main

sys.exit(main())
