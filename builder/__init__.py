"""Builds bundles: turns an exported pair into engines with fixed k, measures them, and seals the folder."""
