"""The parts of the operator: its queue, its Lease, what it writes to the API server, and what it lets a namespace do."""
