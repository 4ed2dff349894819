"""Names in the graphs of this backend: our own operators, which become OpenVINO's when a graph is read, and inputs."""

from __future__ import annotations

DOMAIN = "outrider"
ATTENTION = "PagedAttention"
BLOCK_WEIGHTS = "BlockWeights"
EMBEDDING = "HalfEmbedding"

# Inputs of OpenVINO's PagedAttention, under its names and in its order.
PAST_LENS = "past_lens"  # int32 [N], positions of each sequence that are in the cache
SUBSEQUENCE_BEGINS = "subsequence_begins"  # int32 [N + 1], the first row of each sequence, then the number of rows
BLOCK_INDICES = "block_indices"  # int32, the cache blocks of each sequence, one sequence after the other
BLOCK_INDICES_BEGINS = "block_indices_begins"  # int32 [N + 1], where each sequence begins in `BLOCK_INDICES`
MAX_CONTEXT_LEN = "max_context_len"  # int32 [], positions of the longest sequence after the pass
PAGING = (PAST_LENS, SUBSEQUENCE_BEGINS, BLOCK_INDICES, BLOCK_INDICES_BEGINS, MAX_CONTEXT_LEN)

# Attention has its own rows, because it computes a single row of a sequence differently from several.
ATTENTION_ROWS = "attention_rows"  # int64, for each row of attention, its row in the pass
ATTENDED_ROWS = "attended_rows"  # int64 [T], for each row of the pass, its row in attention

# Features of the rows of a pass: the inputs of a draft head, [T, 1, H], and the outputs of the head or target, [T, 1, 1, H].
READ_FEATURES = "read_features"
NEW_FEATURES = "new_features"
