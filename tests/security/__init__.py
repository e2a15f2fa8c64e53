"""Attacks on the services that a job opens. Everything stays on the loopback interface."""
