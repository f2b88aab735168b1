"""Sparse weights: which blocks of a weight exist, and products that compute those blocks only."""
