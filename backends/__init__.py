"""Backends, which build and run engines: `base` has the interface, `registry` the implementations."""
