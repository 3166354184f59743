"""Train or evaluate; see ``python train_net.py --help``."""

import sys

from nonlocal_det.tools.train import main

if __name__ == "__main__":
    sys.exit(main())
