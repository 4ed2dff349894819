"""The exported graphs rewritten for ONNX Runtime: what it has faster kernels for becomes one node.

Each rewrite is a class with the nodes it looks for (`pattern`), what it refuses and why (`check`), and what it puts in their
place (`rewrite`), built on onnxscript's rewriter; the rules for norms are onnxscript's own. `fuse` applies them all.
"""
