"""The loops of the ranks: attention (a state machine a lane) and experts (stateless).

May import comm, model, schedule, control's messages and kv's export. `main` of `attention` and
`expert` is what a rank process runs.
"""
