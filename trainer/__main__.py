"""`python -m trainer`."""

import os
import time

BEGAN = time.monotonic()
# Else pydantic reads the metadata of every installed package, looking for plugins: 60 ms of every start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

if __name__ == "__main__":
    from trainer.cli import main

    main(BEGAN)
