"""Test doubles: a virtual clock, a simulated group of workers, an oracle for what they must say."""
