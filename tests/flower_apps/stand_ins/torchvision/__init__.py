"""Stands in for `torchvision`, of which the examples only use transforms of images."""
