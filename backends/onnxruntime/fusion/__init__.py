"""Rewrites exported graphs for ONNX Runtime: operations for which it has faster kernels become one node.

Each rewrite is a class with the nodes it looks for (`pattern`), what it refuses and why (`check`), and what it puts in their
place (`rewrite`), built on onnxscript's rewriter; the rules for norms come from onnxscript. `fuse` applies them all.
"""
