"""Measuring by workload, predicting, and comparing policies offline."""
