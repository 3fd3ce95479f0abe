"""Run logging: the files that a run writes for people and for its next start.

metrics     metrics.jsonl, one row per logged step; a full disk does not end a run
record      rows into metrics.jsonl, TensorBoard and the progress line; the table at the end, compared with a baseline
progress    the parts of a start, the progress line, and whether sparse steps are faster than dense ones here
observer    observes weights and masks during training: histograms, pictures, snapshots
snapshots   small pictures of weights at the ends of phases
run_file    run.json: versions, hosts, every start, and events
out_lock    one run at a time in a folder
"""
