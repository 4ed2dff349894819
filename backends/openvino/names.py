"""Names in the graphs of this backend: operators of our own, which become OpenVINO's when a graph is read, and inputs."""

from __future__ import annotations

DOMAIN = "outrider"
ATTENTION = "PagedAttention"
BLOCK_WEIGHTS = "BlockWeights"
EMBEDDING = "HalfEmbedding"

# Inputs of OpenVINO's PagedAttention, under its names and in its order.
PAST_LENS = "past_lens"  # int32 [N], positions of each sequence that are in the cache
SUBSEQUENCE_BEGINS = "subsequence_begins"  # int32 [N + 1], the first row of each sequence, and the number of rows
BLOCK_INDICES = "block_indices"  # int32, the blocks of the cache that belong to each sequence, one sequence after the other
BLOCK_INDICES_BEGINS = "block_indices_begins"  # int32 [N + 1], where those of each sequence begin in `BLOCK_INDICES`
MAX_CONTEXT_LEN = "max_context_len"  # int32 [], positions of the longest sequence after the pass
PAGING = (PAST_LENS, SUBSEQUENCE_BEGINS, BLOCK_INDICES, BLOCK_INDICES_BEGINS, MAX_CONTEXT_LEN)

# Attention gets rows of its own, because it computes a single row of a sequence in another way than several.
ATTENTION_ROWS = "attention_rows"  # int64, which row of the pass each row of attention is
ATTENDED_ROWS = "attended_rows"  # int64 [T], which row of attention belongs to each row of the pass

# Features of the rows of a pass: what a draft head reads, [T, 1, H], and what it or its target makes, [T, 1, 1, H].
READ_FEATURES = "read_features"
NEW_FEATURES = "new_features"
