"""Compiled programs, device state and the step loop. The engine executes; the scheduler decides."""
