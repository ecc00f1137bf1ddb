"""`python -m trainer`."""

import time

BEGAN = time.monotonic()

if __name__ == "__main__":
    from trainer.cli import main

    main(BEGAN)
