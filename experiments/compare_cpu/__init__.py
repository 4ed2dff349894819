"""A comparison of Outrider with other programs that run a draft and a target on a CPU."""
