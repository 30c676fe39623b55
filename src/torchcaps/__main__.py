"""``python -m torchcaps``, which ``torchrun -m torchcaps`` needs too."""

import sys

from torchcaps.cli.main import main

sys.exit(main())
