"""`mxk parity`: the Gaudi kernels against fp32 and beside the stock op.

emulated.py runs their sources on this CPU, device.py a build on a card, both on the calls of cases.py; stock.py is the
stock op's side, model.py the modelled time.
"""
