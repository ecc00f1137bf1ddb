"""What holds for every test: eight CPU devices, set before anything imports jax, and Ctrl-C as a terminal has it."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# A shell starts its background jobs with SIGINT ignored, and so would be all that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
