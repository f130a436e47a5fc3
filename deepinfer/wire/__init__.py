"""The client wire: a server for an engine, and the client that stands for one. docs/wire.md is its text."""
