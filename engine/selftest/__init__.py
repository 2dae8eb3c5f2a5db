"""`asapctl selftest`: whether the hardware computes and carries what it should, and how fast.

`job` puts it together. `pairs` starts the ranks of a topology with entries of its own
(`attention`, `expert`), which send each other messages that both can predict (`traffic`), take the
time of others, and run each operator of their device beside the plain code (`operators`). `model`
runs a small random checkpoint (`checkpoint`) through a real instance, beside the same model in one
process (`reference`). `messages` is what ranks and command say to each other, `report` the outcome.

May import everything of `engine` but `api`, `serve` and `offline`; nothing imports it but asapctl.
"""
