"""``python -m torchcaps``, which ``torchrun -m torchcaps`` needs too."""

import sys

from torchcaps.cli.start import main

sys.exit(main())
