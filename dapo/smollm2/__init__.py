"""Holds word problems of one step, for a pretrained model of 135M parameters that learns on two CPU cores."""
