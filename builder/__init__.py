"""Builds bundles: an exported pair becomes engines with fixed k, measured and sealed."""
