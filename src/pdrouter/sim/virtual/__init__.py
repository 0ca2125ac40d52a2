"""The router's core and engines in virtual time: traces, fleets, runs, figures."""
