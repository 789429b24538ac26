"""How many samples a model needs to a target accuracy with each batch, measured on a proxy data set on a server.

A device cannot find this out itself, since it would have to train to the end with every batch. The server trains on a
proxy data set of the same kind instead. After "Accelerated training on low-power edge devices", section 4.2.
"""
