"""The data plane between attention ranks and expert ranks: four primitives over windows.

`primitives` says what any transport must do, `shm` does it in shared memory. `routing` turns a
router's choice into one dispatch for each expert rank, `layout` says where its bytes lie,
`windows` maps them, `doorbell` announces them. Imported by workers and launch; imports only
topology's plain types.
"""
