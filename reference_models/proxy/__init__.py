"""Measures on a server how many samples a model needs with each batch size to reach a target accuracy.

A device cannot measure this itself, because it would have to train to the end with every batch size. The server trains
on a proxy data set of the same kind instead, as in Ahmed et al., "Accelerated Training on Low-Power Edge Devices"
(arXiv:2502.18323), section 4.2.
"""
