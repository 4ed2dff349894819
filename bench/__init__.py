"""Measures speed by workload, predicts it, and compares policies offline."""
