"""The recurrences of step models as ONNX functions that use only standard operators.

A function of the domain `outrider` is defined in the model itself, so any backend can read it. A backend with its own kernel
for the recurrence replaces the definition. There are two levels. A step model calls `GATED_DELTA` or `GATED`. They join the
kept rows and the rows of the pass into one sequence (see `engines.contract`). They call `<name>Rows` for the rows that go into
the state, and again for the rest.
"""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from outrider.engines.contract import DOMAIN, GATED, GATED_DELTA

OPSETS = f'opset_import: ["" : 24, "{DOMAIN}" : 1]'

# S_t = exp(g_t) S_{t-1} + k_t (v_t - <GATED_DELTA: exp(g_t) S_{t-1}^T k_t>) b_t^T, and o_t = S_t^T q_t, row after row.
ROW_BY_ROW = """
<domain: "{domain}", {opsets}>
{name}Rows <heads> (query, key, value, past, decay{beta}) => (output, present) {{
  axis = Constant <value_ints: ints = [2]> ()
  last = Constant <value_ints: ints = [3]> ()
  both = Constant <value_ints: ints = [2, 3]> ()
  state_heads = Shape <start: int = 1, end: int = 2> (past)
  rows = Shape <start: int = 1, end: int = 2> (query)
  count = Squeeze (rows)
  true = Constant <value = bool {{1}}> ()
  same = Constant <value_ints: ints = [0, 0]> ()
  key_width = Shape <start: int = 2, end: int = 3> (past)
  value_width = Shape <start: int = 3, end: int = 4> (past)
  keys_by_head = Concat <axis: int = 0> (same, state_heads, key_width)
  values_by_head = Concat <axis: int = 0> (same, state_heads, value_width)
  queries = Reshape (query, keys_by_head)
  keys = Reshape (key, keys_by_head)
  values = Reshape (value, values_by_head)
  present, outputs = Loop (count, true, past) <body = row (int64 t, bool more, float[B, H, K, V] state)
    => (bool go_on, float[B, H, K, V] next, float[B, H, V] o) {{
    go_on = Identity (more)
    q = Gather <axis: int = 1> (queries, t)
    k = Gather <axis: int = 1> (keys, t)
    v = Gather <axis: int = 1> (values, t)
    g = Gather <axis: int = 1> (decay, t)
    factor = Exp (g)
    factors = Unsqueeze (factor, both)
    decayed = Mul (state, factors)
    column = Unsqueeze (k, last)
    v_row = Unsqueeze (v, axis)
    {update}
    added = Mul (column, news)
    next = Add (decayed, added)
    q_row = Unsqueeze (q, axis)
    o_row = MatMul (q_row, next)
    o = Squeeze (o_row, axis)
  }}>
  stacked = Transpose <perm = [1, 0, 2, 3]> (outputs)
  batch = Shape <start: int = 0, end: int = 1> (query)
  width = Shape <start: int = 2, end: int = 3> (value)
  shape = Concat <axis: int = 0> (batch, rows, width)
  output = Reshape <allowzero: int = 1> (stacked, shape)
}}
"""
UPDATES = {
    GATED: "news = Identity (v_row)",
    GATED_DELTA: """b = Gather <axis: int = 1> (beta, t)
    rate = Unsqueeze (b, both)
    k_row = Unsqueeze (k, axis)
    known = MatMul (k_row, decayed)
    unknown = Sub (v_row, known)
    news = Mul (unknown, rate)""",
}

# t counts the rows of the longest sequence. All sequences end together. Row r = t - offset of a sequence is the kept row r;
# from `pending` on it is a row of the pass. Rows before the first one, or of the other part, do not change the state: their
# decay is exp(0), and their update rate or value is 0. Sizes come from tensors that all layers share, so they are computed
# once.
WITH_KEPT = """
<domain: "{domain}", {opsets}>
{name} <heads, key_heads> (query, row, past_rows, past_state, pending, committed, places, any_rows)
  => (output, present_rows, present_state) {{
  zero = Constant <value_int: int = 0> ()
  one = Constant <value_int: int = 1> ()
  first = Constant <value_ints: ints = [0]> ()
  second = Constant <value_ints: ints = [1]> ()
  third = Constant <value_ints: ints = [2]> ()
  zero_f = Constant <value_float: float = 0.0> ()
  pass_rows = Shape <start: int = 1, end: int = 2> (places)
  recent = Shape <start: int = 1, end: int = 2> (any_rows)
  longest = ReduceMax <keepdims: int = 1> (pending)
  total = Add (longest, pass_rows)
  total_s = Squeeze (total)
  t = Range (zero, total_s, one)
  t_row = Unsqueeze (t, first)
  offset = Sub (longest, pending)
  offset_c = Unsqueeze (offset, second)
  r = Sub (t_row, offset_c)
  pending_c = Unsqueeze (pending, second)
  committed_c = Unsqueeze (committed, second)
  behind = Sub (recent, pending_c)
  joined = Concat <axis: int = 1> (past_rows, row)
  is_own = GreaterOrEqual (r, pending_c)
  r_own = Add (r, behind)
  r_any = Where (is_own, r_own, r)
  r_here = Max (r_any, zero)
  r_index = Unsqueeze (r_here, third)
  rows = GatherND <batch_dims: int = 1> (joined, r_index)
  recent_s = Squeeze (recent)
  n = Range (zero, recent_s, one)
  n_row = Unsqueeze (n, first)
  n_kept = Add (n_row, committed_c)
  n_is_own = GreaterOrEqual (n_kept, pending_c)
  n_own = Add (n_kept, behind)
  n_any = Where (n_is_own, n_own, n_kept)
  end = Add (recent, pass_rows)
  end_s = Squeeze (end)
  last = Sub (end_s, one)
  n_here = Min (n_any, last)
  n_index = Unsqueeze (n_here, third)
  present_rows = GatherND <batch_dims: int = 1> (joined, n_index)
  heads_0 = Constant <value_int: int = @heads> ()
  heads_1 = Unsqueeze (heads_0, first)
  key_width = Shape <start: int = 2, end: int = 3> (past_state)
  value_width = Shape <start: int = 3, end: int = 4> (past_state)
  key_heads = Constant <value_int: int = @key_heads> ()
  key_heads_1 = Unsqueeze (key_heads, first)
  groups = Div (heads_1, key_heads_1)
  keys_size = Mul (key_heads_1, key_width)
  values_size = Mul (heads_1, value_width)
  sizes = Concat <axis: int = 0> (keys_size, values_size, heads_1{beta_size})
  k, v, g{b} = Split <axis: int = 2> (rows, sizes)
  nothing = Constant <value_ints: ints = [0, 0, 0]> ()
  in_front = Concat <axis: int = 0> (first, longest, first, nothing)
  q = Pad (query, in_front, zero_f)
  batch = Shape <start: int = 0, end: int = 1> (places)
  one_1 = Constant <value_ints: ints = [1]> ()
  apart = Concat <axis: int = 0> (batch, total, key_heads_1, one_1, key_width)
  repeated = Concat <axis: int = 0> (batch, total, key_heads_1, groups, key_width)
  all_keys = Mul (heads_1, key_width)
  packed = Concat <axis: int = 0> (batch, total, all_keys)
  q_apart = Reshape (q, apart)
  q_repeated = Expand (q_apart, repeated)
  queries = Reshape (q_repeated, packed)
  k_apart = Reshape (k, apart)
  k_repeated = Expand (k_apart, repeated)
  keys = Reshape (k_repeated, packed)
  until = Add (offset, committed)
  until_c = Unsqueeze (until, second)
  is_here = GreaterOrEqual (r, zero)
  goes_in = Less (t_row, until_c)
  is_first = And (is_here, goes_in)
  stays = Not (goes_in)
  is_second = And (is_here, stays)
  goes_in_c = Unsqueeze (goes_in, third)
  first_c = Unsqueeze (is_first, third)
  second_c = Unsqueeze (is_second, third)
  most = ReduceMax <keepdims: int = 1> (until)
  fewest = ReduceMin <keepdims: int = 1> (until)
  {masked}_first = Where (first_c, {masked}, zero_f)
  {masked}_second = Where (second_c, {masked}, zero_f)
  q_1 = Slice (queries, first, most, second)
  k_1 = Slice (keys, first, most, second)
  v_1 = Slice ({v_1}, first, most, second)
  g_first = Where (first_c, g, zero_f)
  g_1 = Slice (g_first, first, most, second)
  {b_1}
  o_1, present_state = {domain}.{name}Rows <heads: int = @heads> (q_1, k_1, v_1, past_state, g_1{b_1_arg})
  q_2 = Slice (queries, fewest, total, second)
  k_2 = Slice (keys, fewest, total, second)
  v_2 = Slice ({v_2}, fewest, total, second)
  g_second = Where (second_c, g, zero_f)
  g_2 = Slice (g_second, fewest, total, second)
  {b_2}
  o_2, unused = {domain}.{name}Rows <heads: int = @heads> (q_2, k_2, v_2, present_state, g_2{b_2_arg})
  missing = Sub (total, most)
  at_end = Concat <axis: int = 0> (nothing, first, missing, first)
  o_in = Pad (o_1, at_end, zero_f)
  before = Concat <axis: int = 0> (first, fewest, first, nothing)
  o_behind = Pad (o_2, before, zero_f)
  o = Where (goes_in_c, o_in, o_behind)
  output = Slice (o, longest, total, second)
}}
"""


def functions(rule: str) -> list[ir.Function]:
    """Return the definitions of `GATED` or `GATED_DELTA` and of the functions that it calls."""
    names = {"domain": DOMAIN, "opsets": OPSETS, "name": rule}
    has_beta = rule == GATED_DELTA
    own = dict.fromkeys(("beta_size", "b", "b_1", "b_2", "b_1_arg", "b_2_arg"), "")
    if has_beta:
        own = {
            "beta_size": ", heads_1",
            "b": ", b",
            "b_1": "b_1 = Slice (b_first, first, most, second)",
            "b_2": "b_2 = Slice (b_second, fewest, total, second)",
            "b_1_arg": ", b_1",
            "b_2_arg": ", b_2",
        }
    masked, v_1, v_2 = ("b", "v", "v") if has_beta else ("v", "v_first", "v_second")
    texts = [
        ROW_BY_ROW.format(**names, beta=", beta" if has_beta else "", update=UPDATES[rule]),
        WITH_KEPT.format(**names, **own, masked=masked, v_1=v_1, v_2=v_2),
    ]
    return [ir.serde.deserialize_function(onnx.parser.parse_function(text)) for text in texts]
