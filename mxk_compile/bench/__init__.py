"""`mxk bench`: time and error of one MoE layer call, as lines of JSON that can be compared, checked and drawn.

A `Point` (points.py) names a call: model row, local experts, tokens, routing. cases.py makes its tensors,
implementations.py the ways to run it, timing.py the clocks, runner.py the rows (rows.py), of which compare.py makes the
table, check.py the verdict against benchmarks/baseline, and `mxk_compile.report` the page.
"""
