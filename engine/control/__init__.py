"""Typed messages, the controller and its client. ZeroMQ and msgpack; no torch, no pickle."""
