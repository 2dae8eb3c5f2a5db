"""Pure scheduling policies: which prompts form a batch, which group gets it, what an expert
rank serves next.

No torch, no input or output, no clock: time is an argument, so that the engine and a
simulator can run the same code. Imports nothing but `engine.topology`'s plain types.
"""
