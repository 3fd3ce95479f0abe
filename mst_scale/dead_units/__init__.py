"""Units whose weights are all zero: which they are, how many, and how they are woken.

kinds      neurons and channels, and how their numbers are said
units      which rows and columns of which matrices make up a unit, and the rule by which it is dead
lines      which rows and columns of a matrix hold anything but zeros, from any slices of it
live       counting and waking while a model trains, on the shards of its ranks
"""
