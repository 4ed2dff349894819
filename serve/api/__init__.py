"""The HTTP API: the requests that it accepts, and their responses."""
