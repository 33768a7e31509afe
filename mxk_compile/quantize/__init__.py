"""`mxk quantize SRC DST`: a bf16 or fp16 MoE checkpoint to one with packed experts, tensor by tensor.

layouts.py    which tensors are experts, and what becomes of each
shards.py     safetensors files written in place, and the folder that becomes DST at the end
convert.py    the work: reading, rounding, errors, going on after an interruption

Rounding. MXFP4: the rule of the OCP Microscaling specification 1.0, section 6.3: the scale of 32 values is the power of
two of the largest magnitude's exponent less 2, each value the nearest code, ties to the even one, saturating at 6.
INT4: symmetric, groups of 32, scale = largest magnitude / 7 in bf16, the nearest code -7..7 for that scale.
"""
