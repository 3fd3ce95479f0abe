"""Writes and reads the files that a run leaves for people and for its next start.

metrics           metrics.jsonl, a row a logged step
record            a row into metrics.jsonl, TensorBoard and the progress line; the table at the end
recording         an engine in a loop of somebody else's
starting          what a start is busy with
step_times        whether sparse steps are faster than dense ones here
rival             how a run that has ended stands to a recorded one
progress          the line on the terminal
observer          looks at weights and masks while a model trains: histograms, pictures, snapshots
snapshots         small pictures of weights at the ends of phases
run_file          run.json: versions, hosts, every start and what happened
out_lock          one run at a time in a folder
optional_writes   what a full disk may cost
"""
