"""Units, neurons and channels: which are dead, how many, how they are woken, and how whole ones live and die.

kinds      neurons and channels, and how their numbers are said
units      which rows and columns of which matrices make up a unit, and the rule by which it is dead
lines      which rows and columns of a matrix hold anything but zeros, from any slices of it
channels   units as what masks are made of
live       counting and waking while a model trains, on the shards of its ranks
"""
