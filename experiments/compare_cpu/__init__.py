"""Outrider beside other programs that run a pair on a CPU."""
