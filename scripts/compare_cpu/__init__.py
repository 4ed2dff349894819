"""The benchmark behind `scripts/compare-cpu`."""
