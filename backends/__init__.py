"""What builds and runs engines: `base` has the interface, `registry` the implementations."""
