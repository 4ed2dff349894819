"""Rewrites exported graphs for ONNX Runtime: groups of operators that have a faster kernel become one node.

Each rewrite is a class for onnxscript's rewriter: `pattern` is the nodes that it finds, `check` refuses some of them with a
reason, and `rewrite` returns the replacement. The rules for norms come from onnxscript. `fuse` applies all rewrites.
"""
