"""The two faces of a Transformer: reading token ids and predicting them."""
